"""How commands show what they found."""
