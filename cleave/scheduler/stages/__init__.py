"""Stage-wise training steps: assignment of micro-batch passes to devices."""
