"""Training on several servers: Ray starts them, and starts them again when one is lost."""
