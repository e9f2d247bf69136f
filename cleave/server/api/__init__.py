"""What operators and the dashboard ask of a server."""
