"""The training loop, optimizers, checkpoints, the journal and records."""
