"""Plans for single matrix products."""
