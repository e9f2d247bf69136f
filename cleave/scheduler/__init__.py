"""The parameter server's core: turns events into instructions, without I/O."""
