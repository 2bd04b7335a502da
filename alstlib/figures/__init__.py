"""Plots and widgets of the lessons and reports; nothing is computed here.

`plots` has the charts, in one style; `step_plots` those of one training step; `widgets` the live controls.
"""
