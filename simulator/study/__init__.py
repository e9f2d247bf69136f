"""The set-up of the edge-sustainability paper (arXiv 2507.01803), and where its claims hold."""
