"""The device program: protocol state machine, session with a server, and owner's policy."""
