"""Tests of the protocol: its codec, its vectors and its document."""
