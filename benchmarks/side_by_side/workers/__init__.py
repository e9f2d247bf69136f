"""The processes of peers: plain PyTorch with Cleave's data, model, optimizer and order of batches.

Each process takes its part of every batch, so that losses are those of one machine.
"""
