"""Plots and widgets of the lessons and the reports; they show results and compute none.

`plots` has the charts, in one style; `layer` the picture that opens each lesson; `step_plots` the charts of one step;
`widgets` the live controls.
"""
