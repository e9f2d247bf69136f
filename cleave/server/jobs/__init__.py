"""Training jobs on the server, and the energy that they use."""
