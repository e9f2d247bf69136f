"""Matrix products by tiles: the assignment of tasks to devices."""
