"""The owner's policy for lending a machine: idle time, power supply, temperature, data cap."""
