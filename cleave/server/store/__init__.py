"""Stored data of the server, in its data folder and SQLite file."""
