"""Train whole layers on devices (stages)."""
