"""Training on several parameter servers. Ray starts the servers and restarts lost servers."""
