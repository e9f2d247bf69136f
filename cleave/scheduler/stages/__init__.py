"""Assign micro-batch passes to devices in training steps by stages."""
