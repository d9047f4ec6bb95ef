"""Figures of a report: each function takes what a search left and returns a plotly figure; None: nothing is known."""
