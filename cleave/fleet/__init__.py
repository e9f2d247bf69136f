"""The fleet, as used by training: `Fleet.submit(...) -> GemmFuture`."""
