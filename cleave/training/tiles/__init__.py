"""Linear layers whose matrix multiplications run on devices (tiles)."""
