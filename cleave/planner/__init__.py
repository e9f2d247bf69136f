"""Plans: which device multiplies which tile. Functions of numbers, without torch or network."""
