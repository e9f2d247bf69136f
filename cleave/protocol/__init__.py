"""The tile protocol between the PS and its clients: message types, codec, version and limits.

`docs/protocol.md` is normative.
"""
