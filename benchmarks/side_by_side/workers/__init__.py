"""Worker processes: plain PyTorch with Cleave's data, model, optimizer and order of batches.

Each process takes its part of every batch, so losses equal those of one machine.
"""
