"""Answers to the requests of operators and of the dashboard."""
