"""The protocol between the PS and its clients. `docs/protocol.md` is normative."""
