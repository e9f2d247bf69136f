"""The device side: its state machine, its session with a server, and when it may work."""
