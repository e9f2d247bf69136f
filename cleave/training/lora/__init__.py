"""LoRA adapters and quantized frozen weights."""
