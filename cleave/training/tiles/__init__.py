"""Linear layers whose products are computed on devices."""
