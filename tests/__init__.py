"""Tests. Importing this first gives every process one thread for its arithmetic.

A suite that runs in two processes on two cores, and starts more of them, would have threads that
spin while they wait for one another. Read when numpy and torch are imported.
"""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
