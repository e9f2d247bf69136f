"""Messages of the protocol with their bytes, shared by all clients; see README.md."""
