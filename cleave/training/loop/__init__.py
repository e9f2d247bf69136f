"""The training loop, its optimizer, checkpoints and records."""
