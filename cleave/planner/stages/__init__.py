"""Plan training steps in which devices compute whole layers (stages)."""
