"""Training jobs on the server, and the energy used for each job."""
