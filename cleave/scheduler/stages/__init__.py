"""Training steps by stages: assignment of micro-batch passes to devices."""
