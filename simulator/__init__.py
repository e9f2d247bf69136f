"""Simulated training methods, and checks of published claims against them."""
