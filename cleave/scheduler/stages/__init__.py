"""Steps by stages: which device does what."""
