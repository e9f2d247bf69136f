"""Training of one model on several servers: division of steps, gradient sums, sharded weights."""
