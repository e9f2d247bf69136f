"""What training sees of the devices: `Fleet.submit(...) -> GemmFuture`, and the PS's core."""
