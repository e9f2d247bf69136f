"""Models of training methods in closed form, and published claims checked against them."""
