"""The server's core: sessions, tasks and arrays. Events in, instructions out; no I/O."""
