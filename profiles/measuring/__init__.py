"""Measurement of the figures in a device profile: this machine's compute, and its link to a PS."""
