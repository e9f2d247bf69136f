"""A device goes where its server sends it, stays there, and goes home when it is not wanted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from cleave.device.agent import ServerSelection
from cleave.errors import CleaveError
from cleave.transport.join_url import JoinUrl

HOME = JoinUrl("ws://127.0.0.1:1/ws", "secret", fingerprint="")
OTHER = "ws://127.0.0.1:2/ws"


@dataclass
class Session:
    welcomed: bool = True
    moves_to: str = ""


class Network:
    """Servers of which some cannot be reached."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.asked: list[JoinUrl] = []

    async def connect(self, target: JoinUrl) -> str:
        self.asked.append(target)
        if target.address in self.gone:
            raise CleaveError("nobody there")
        return target.address


def opened(place: ServerSelection, network: Network, then: Session) -> str:
    try:
        found = asyncio.run(place.open(HOME, network.connect))
    except CleaveError:
        return ""
    place.at(then)
    return found


def test_it_goes_where_it_is_sent_with_its_credential_and_stays_there() -> None:
    place, network = ServerSelection(), Network()
    assert opened(place, network, Session(moves_to=f"{OTHER}#c=")) == HOME.address
    assert opened(place, network, Session()) == OTHER
    assert network.asked[-1].credential == HOME.credential
    assert opened(place, network, Session()) == OTHER  # the connection broke, and is made again


def test_it_goes_home_where_it_is_not_welcome_or_nobody_is_there() -> None:
    place, network = ServerSelection(), Network()
    opened(place, network, Session(moves_to=f"{OTHER}#c="))
    assert opened(place, network, Session(welcomed=False)) == OTHER
    assert opened(place, network, Session(moves_to=f"{OTHER}#c=")) == HOME.address
    network.gone.add(OTHER)
    assert opened(place, network, Session()) == ""
    assert opened(place, network, Session()) == HOME.address


@pytest.mark.parametrize("address", ["nonsense", "https://127.0.0.1:3/elsewhere", "ws://"])
def test_what_is_no_address_moves_nobody(address: str) -> None:
    place, network = ServerSelection(), Network()
    opened(place, network, Session(moves_to=address))
    assert opened(place, network, Session()) == HOME.address


def test_a_pinned_certificate_is_that_of_the_other_server() -> None:
    place, network = ServerSelection(), Network()
    pin = "sha256:" + "ab" * 32
    opened(place, network, Session(moves_to=f"wss://127.0.0.1:2/ws#c=&fp={pin}"))
    opened(place, network, Session())
    assert network.asked[-1].fingerprint == pin
    assert network.asked[-1].address.startswith("wss://")
