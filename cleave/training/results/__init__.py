"""Uses of a trained model: export, generation, evaluation."""
