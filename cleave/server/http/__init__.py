"""Plain HTTP answers of the server: pages and metrics."""
