"""Planning of training steps in which devices compute whole layers (stages)."""
