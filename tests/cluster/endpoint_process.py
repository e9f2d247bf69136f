"""A server's endpoint in a process of its own, as Ray starts it; its setup is an argument."""

from __future__ import annotations

import json
import pickle
import sys
import threading

from cleave.cluster.endpoint import OwnEndpoint
from cleave.cluster.endpoint_calls import ServedEndpoint


def main() -> None:
    """Open the endpoint, say how it is called, and stay until killed."""
    endpoint = OwnEndpoint(pickle.loads(bytes.fromhex(sys.argv[1])))
    calls = pickle.dumps(ServedEndpoint(endpoint, "127.0.0.1").calls())
    sys.stdout.write(json.dumps({"event": "listening", "calls": calls.hex()}) + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
