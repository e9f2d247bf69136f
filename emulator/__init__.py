"""Emulated devices: the real dispatcher and the real device core on modelled links and compute."""
