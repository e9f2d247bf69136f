"""Format the commands' output as tables, plots, CSV and JSON."""
