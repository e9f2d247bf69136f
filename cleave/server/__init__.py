"""What runs on the server."""
