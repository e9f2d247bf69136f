"""The training process's interface to a fleet: `Fleet.submit` runs a GEMM on devices."""
