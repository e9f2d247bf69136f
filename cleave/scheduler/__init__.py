"""The core of the server, without I/O. It receives events and returns instructions."""
