"""What the server answers to plain HTTP: pages and metrics."""
