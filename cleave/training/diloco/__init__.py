"""Local updates (DiLoCo): another algorithm than exact training, for slow uplinks."""
