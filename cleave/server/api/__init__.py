"""Answers to requests of operators and the dashboard."""
