"""This machine: what multiplies on it, what its sensors show, how a process holds memory."""
