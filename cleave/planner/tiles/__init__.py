"""Plan single matrix products (GEMMs) in tiles."""
