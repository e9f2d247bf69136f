"""Scripts that measure every figure that Cleave claims; each prints ratios of one run."""
