"""The server's core: device sessions, tasks, arrays. Events in, instructions out; no I/O."""
