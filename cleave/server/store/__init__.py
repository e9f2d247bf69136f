"""What the server stores, in its data folder and its SQLite file."""
