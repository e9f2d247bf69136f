"""Training methods by simulation, and published claims checked against them."""
