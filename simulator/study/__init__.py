"""Simulate the edge-sustainability paper (arXiv 2507.01803) and test its claims."""
