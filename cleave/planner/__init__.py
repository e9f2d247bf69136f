"""Planning: which device computes which part of a training step.

The planner consists of pure functions. It does not import torch and does not use the network.
"""
