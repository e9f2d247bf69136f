"""Training on several servers."""
