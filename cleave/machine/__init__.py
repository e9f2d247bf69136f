"""This machine: its compute backends, its sensors, and the memory of its processes."""
