"""Adapters, and frozen weights that are quantized."""
