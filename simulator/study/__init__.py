"""The set-up of the edge-sustainability paper (arXiv 2507.01803), and when its claims hold."""
