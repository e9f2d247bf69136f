"""What one would pick instead of Cleave, beside it: the same work behind the same links."""
