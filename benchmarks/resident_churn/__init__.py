"""Simulation of stages whose weights and optimizer state stay on devices that come and go."""
