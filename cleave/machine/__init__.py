"""Access to this machine: compute backends, graph execution, sensors, and memory settings."""
