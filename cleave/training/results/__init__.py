"""Uses of a trained model: export, text generation and evaluation."""
