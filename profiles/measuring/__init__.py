"""Measurement of a device and its link, for a profile."""
