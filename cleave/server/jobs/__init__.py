"""Training jobs on the server, and the energy they use."""
