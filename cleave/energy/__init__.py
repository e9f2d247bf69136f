"""Energy consumption and carbon emissions of training on a fleet."""
