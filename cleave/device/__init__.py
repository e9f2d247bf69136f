"""What runs on a device: its state machine, its session with a server, when it works at all."""
