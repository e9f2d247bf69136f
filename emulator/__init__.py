"""Emulated devices: Cleave's scheduler and device program with modelled links and processors."""
