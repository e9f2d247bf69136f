"""Lossless compression of floating-point payloads."""
