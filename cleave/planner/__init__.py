"""Plans: who multiplies what. Functions of numbers; nothing here knows torch or a network."""
