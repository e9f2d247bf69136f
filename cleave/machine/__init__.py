"""Access to this machine: compute backends, sensors, and memory settings of device processes."""
