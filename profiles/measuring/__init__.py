"""Measure the figures in a device profile: this machine's compute speed and its link to a PS."""
