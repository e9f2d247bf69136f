"""Formatting of the commands' output as tables, plots, CSV and JSON."""
