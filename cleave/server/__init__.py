"""The parameter server's process: listening, access, the store, training jobs, HTTP."""
