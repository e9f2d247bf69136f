"""Methods of training compared in closed form, and published claims held against them."""
