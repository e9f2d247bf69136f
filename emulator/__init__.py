"""Emulated devices: the real scheduler and the real device core on modelled links and compute."""
