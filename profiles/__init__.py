"""What is known of devices: the profile schema and the built-in fleets."""
