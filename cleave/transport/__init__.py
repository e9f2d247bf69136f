"""Network connections for servers and clients: WebSockets, TLS, join URLs and addresses."""
