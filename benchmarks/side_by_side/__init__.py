"""Comparison of Cleave with its alternatives: the same work behind the same links."""
