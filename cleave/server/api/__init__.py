"""Handlers of requests from operators, viewers and the dashboard."""
