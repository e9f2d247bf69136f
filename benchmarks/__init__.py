"""Scripts that measure every figure that Cleave claims; each prints ratios from one run."""
