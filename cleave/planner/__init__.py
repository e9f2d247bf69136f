"""Planning of the work of each device in a training step.

The planner consists of pure functions. It does not import torch and does not use the network.
"""
