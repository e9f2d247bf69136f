"""Simulation of the edge-sustainability paper (arXiv 2507.01803), and tests of its claims."""
