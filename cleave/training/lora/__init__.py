"""Train LoRA adapters, and optionally quantize the frozen weights (QLoRA)."""
