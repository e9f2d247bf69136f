"""The tile protocol: message types, codec, version and limits. `docs/protocol.md` is normative."""
