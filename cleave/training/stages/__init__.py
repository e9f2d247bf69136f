"""Training whole layers on devices."""
