"""Training on several servers, which Ray starts and restarts after a loss."""
