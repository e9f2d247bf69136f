"""Storage of a server's data in its data folder, which contains an SQLite database."""
