"""Rounds of local updates: devices train whole models alone and return differences."""
