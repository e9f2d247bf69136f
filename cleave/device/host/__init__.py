"""When the owner of a machine lets it work: idleness, power supply, temperature."""
