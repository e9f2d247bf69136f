"""What training sees of the devices: `Fleet.submit(...) -> GemmFuture`."""
