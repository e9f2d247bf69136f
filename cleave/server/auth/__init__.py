"""Who may come in: join codes, credentials, operators' tokens."""
