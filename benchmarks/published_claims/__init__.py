"""The claims of the Cleave paper (arXiv 2512.22142), tested by simulation."""
