"""What models consist of: their sizes, their multiplications, and the models themselves."""
