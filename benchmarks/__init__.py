"""Measurements behind every figure that Cleave claims; each script prints ratios of one run."""
