"""The device side: the state machine, the session with a server, and the owner's policy."""
