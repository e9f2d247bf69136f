"""GEMM jobs, their tasks, the scheduler of these tasks, and the record of device memory."""
