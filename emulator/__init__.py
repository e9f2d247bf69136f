"""Emulated devices: Cleave's real scheduler and device program on modelled links and processors."""
