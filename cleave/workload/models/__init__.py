"""Building and loading models as torch modules."""
