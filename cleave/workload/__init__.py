"""Models as sizes, as the GEMMs of a training step, and as torch modules."""
