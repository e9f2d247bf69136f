"""Planning of single matrix products (GEMMs) in tiles."""
