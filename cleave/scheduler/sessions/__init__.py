"""Devices: how they join, how fast they are, and whether they are trusted."""
