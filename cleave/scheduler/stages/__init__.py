"""Stage-wise training steps: which device runs which micro-batch."""
