"""Energy and carbon of training on a fleet."""
