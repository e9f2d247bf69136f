"""What runs on a device: its state machine, its session with a server, and when it may work."""
