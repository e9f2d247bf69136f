"""Plan which work each device does in a training step.

The planner neither imports torch nor uses the network.
"""
