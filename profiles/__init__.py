"""What is known of devices: the profile schema, the library of profiles, the built-in fleets."""
