"""Matrix products by tiles: which device does what."""
