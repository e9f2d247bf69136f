"""The edge-sustainability paper (arXiv 2507.01803): its set-up simulated, its claims tested."""
