"""Who can reach a server at the address that it tells people."""

from __future__ import annotations

from urllib.parse import urlsplit

from cleave.transport.addresses import is_loopback


def only_here(url: str) -> str:
    """A sentence for an address that works on this machine alone; empty for any other."""
    host = urlsplit(url).hostname or ""
    if not is_loopback(host):
        return ""
    return (
        f"{host} is this machine alone: for phones and other machines, start the server with "
        f"`cleave serve --host 0.0.0.0`"
    )
