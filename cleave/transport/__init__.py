"""Both ends of a connection: WebSockets, TLS, join URLs, addresses."""
