"""Training of LoRA adapters, with optional quantization of the frozen weights (QLoRA)."""
