"""Handle requests from operators, viewers and the dashboard."""
