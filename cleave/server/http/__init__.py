"""Plain HTTP responses of the server: web pages and Prometheus metrics."""
