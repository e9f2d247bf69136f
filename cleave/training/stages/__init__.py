"""Training of whole layers on devices (stages)."""
