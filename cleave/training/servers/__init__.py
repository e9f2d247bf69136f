"""Train one model on several servers: divide steps, sum gradients and shard weights."""
