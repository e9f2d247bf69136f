"""Models as sizes, as GEMMs of a training step, and as torch modules."""
