"""The fleet as training sees it: `Fleet.submit(...) -> GemmFuture`."""
