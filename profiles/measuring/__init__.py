"""Measuring a device and its link, for a profile."""
