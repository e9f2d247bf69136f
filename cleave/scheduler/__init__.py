"""The parameter server's core, which turns events into instructions. It does no I/O."""
