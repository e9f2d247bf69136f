"""Plans for steps by stages."""
