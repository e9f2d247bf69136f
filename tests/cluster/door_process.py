"""A server's door in a process of its own, as Ray starts it; its setup is an argument."""

from __future__ import annotations

import json
import pickle
import sys
import threading

from cleave.cluster.door_calls import ServedDoor
from cleave.cluster.own_door import OwnDoor


def main() -> None:
    """Open the door, say how it is called, and stay until killed."""
    door = OwnDoor(pickle.loads(bytes.fromhex(sys.argv[1])))
    calls = pickle.dumps(ServedDoor(door, "127.0.0.1").calls())
    sys.stdout.write(json.dumps({"event": "listening", "calls": calls.hex()}) + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
