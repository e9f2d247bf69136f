"""Device profiles: their schema, the library of profiles, and the built-in fleets."""
