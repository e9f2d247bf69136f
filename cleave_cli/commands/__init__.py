"""The commands of `cleave`, with one module per command."""
