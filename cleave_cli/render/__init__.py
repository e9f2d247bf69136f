"""The output of commands: tables, plots and JSON."""
