"""Training steps by stages: the assignment of micro-batches to devices."""
