"""Training data: documents, conversations, tokenizers and batches."""
