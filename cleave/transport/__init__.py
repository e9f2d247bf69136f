"""The asyncio shells: WebSocket and in-memory sessions around the PS's core and the device core."""
