"""Simulate training methods and test published claims against simulated results."""
