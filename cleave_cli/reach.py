"""A hint for users whose server listens only on the loopback interface."""

from __future__ import annotations

from urllib.parse import urlsplit

from cleave.transport.addresses import is_loopback


def only_here(url: str) -> str:
    """Return a hint if the URL has a loopback address; otherwise an empty string."""
    host = urlsplit(url).hostname or ""
    if not is_loopback(host):
        return ""
    return (
        f"{host} is this machine alone: for phones and other machines, start the server with "
        f"`cleave serve --host 0.0.0.0`"
    )
