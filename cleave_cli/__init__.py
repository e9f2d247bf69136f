"""The `cleave` command line."""
