"""Model sizes, the GEMMs of a training step, and models as torch modules."""
