"""What the server knows for good, in its folder and its SQLite file."""
