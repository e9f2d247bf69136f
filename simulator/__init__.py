"""Simulation of training methods, and tests of published claims against simulated results."""
