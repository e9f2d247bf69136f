"""Garbage over real sockets: its sender is told and cut off, an honest device works on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

import cleave
from cleave.device.compute_thread import ComputeThread
from cleave.machine.backends import NumpyBackend
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Message
from cleave.server.fleet_server import Server
from cleave.transport.join_url import parse_join_url
from tests.fuzzing import HELLO, UNSTATED, Mutator
from tests.integration.processes import PATIENCE_S
from tests.integration.test_verification import device, multiply

BAD = b"\xc1"
"""No message, whatever came before."""


def _attack(server: Server, frames: Sequence[bytes | str]) -> list[Message]:
    """Send frames until the server has had enough; returns what it said."""
    address = parse_join_url(server.url).address
    with connect(address, compression=None, max_size=None) as socket:
        try:
            for frame in frames:
                socket.send(frame)
        except ConnectionClosed:
            pass
        return _until_closed(socket)


def _until_closed(socket: ClientConnection) -> list[Message]:
    said: list[Message] = []
    while True:
        try:
            data = socket.recv(timeout=PATIENCE_S)
        except ConnectionClosed:
            return said
        assert isinstance(data, bytes)
        said.append(decode(data))


def _history(server: Server, seed: int) -> list[bytes]:
    """Frames of a device that joins properly, or not, and then says anything; `BAD` at the end."""
    random = Random(seed)
    mutator = Mutator(random)
    frames = [mutator.next() for _ in range(random.randrange(12))]
    if seed % 3:
        hello = replace(
            random.choice([HELLO, UNSTATED]), credential=parse_join_url(server.url).credential
        )
        frames.insert(0, b"".join(encode(hello)))
    return [*frames, BAD]


def test_who_sends_no_message_is_told_so(served: Server) -> None:
    for frame in (BAD, b"", b"\x00" * 8_000, "text", b"\xdd\xff\xff\xff\xff"):
        (error,) = _attack(served, [frame])
        assert isinstance(error, messages.Error)
        assert error.code is messages.ErrorCode.PROTOCOL


def test_an_honest_device_works_on_among_garbage(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.ERROR),
        cleave.serve() as server,
        device(server, "honest", ComputeThread(NumpyBackend())) as honest,
        ThreadPoolExecutor(3) as attackers,
    ):
        attacks = [attackers.submit(_attack, server, _history(server, seed)) for seed in range(60)]
        for seed in range(5):
            ours, plain = multiply(server, seed)
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
        ends = [attack.result()[-1:] for attack in attacks]
        refused = [said for said in ends if said and isinstance(said[0], messages.Error)]
        assert len(refused) > 30  # the others took their leave before the end
        ours, plain = multiply(server, 5)
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
        assert server.fleet.device_count == 1
        assert not honest
    assert not caplog.records, "the server's loop met what it did not expect"
