"""Planning of the work of each device in a training step.

The planner neither imports torch nor uses the network.
"""
