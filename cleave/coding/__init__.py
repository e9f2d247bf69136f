"""Fewer bytes for floating-point payloads, exact to the bit."""
