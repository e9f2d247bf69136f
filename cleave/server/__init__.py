"""The parameter server process: listener, access control, store, training jobs and HTTP pages."""
