"""Training of one model on several servers: step division, gradient sums, sharded weights."""
