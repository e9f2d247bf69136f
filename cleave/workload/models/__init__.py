"""Models as torch modules."""
