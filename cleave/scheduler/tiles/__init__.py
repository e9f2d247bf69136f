"""GEMM jobs: their tasks, the scheduler, and device memory."""
