"""Plans of which device computes what. Pure functions, without torch and network."""
