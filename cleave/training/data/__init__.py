"""Training data: texts, conversations, tokens, batches."""
