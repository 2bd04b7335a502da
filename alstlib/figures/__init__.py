"""Plots and widgets of the lessons and reports; nothing is computed here.

`plots` has the charts, in one style; `layer` the picture that opens each lesson; `step_plots` the charts of one step;
`widgets` the live controls.
"""
