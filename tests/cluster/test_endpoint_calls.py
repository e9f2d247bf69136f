"""The endpoint of the first server is called by workers of the cluster, and by nobody else."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest

from cleave.cluster import endpoint_calls
from cleave.cluster.endpoint_calls import ConnectionCalls, EndpointLostError, ServedEndpoint
from cleave.errors import FleetError, UsageError


class Endpoint:
    """An endpoint that only answers."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.may_go_on = threading.Event()

    def echo(self, *values: Any) -> Any:
        self.called.append(values)
        return values

    def refuse(self) -> None:
        raise UsageError("no")

    def fail(self) -> None:
        raise KeyError("what")

    def wait(self) -> str:
        self.may_go_on.wait()
        return "waited"


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.fixture
def served(endpoint: Endpoint) -> Iterator[ServedEndpoint]:
    served = ServedEndpoint(endpoint, "127.0.0.1")  # type: ignore[arg-type]
    with closing(served):
        yield served
        endpoint.may_go_on.set()


def test_a_worker_calls_a_endpoint_of_another_process(
    served: ServedEndpoint, endpoint: Endpoint
) -> None:
    calls = pickle.loads(pickle.dumps(served.calls()))
    assert calls.call("echo", 1, "two") == (1, "two")
    calls.tell("echo", 3)
    assert endpoint.called == [(1, "two"), (3,)]


def test_errors_are_raised_where_it_was_called(served: ServedEndpoint) -> None:
    calls = served.calls()
    with pytest.raises(UsageError, match="no"):
        calls.call("refuse")
    with pytest.raises(FleetError, match="unexpected KeyError"):
        calls.call("fail")
    assert calls.call("echo") == ()  # and it goes on


def test_a_call_that_waits_holds_up_no_other(served: ServedEndpoint, endpoint: Endpoint) -> None:
    calls = served.calls()
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(calls.call("wait")))
    waiting.start()
    assert calls.call("echo", 1) == (1,)
    endpoint.may_go_on.set()
    waiting.join()
    assert answers == ["waited"]


def test_nobody_calls_without_the_key(served: ServedEndpoint, endpoint: Endpoint) -> None:
    address: Any = served._listener.address
    with pytest.raises(EndpointLostError):
        ConnectionCalls(address, b"another key").call("echo", 1)
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        Client(address, authkey=b"")
    with socket.create_connection(address) as stranger, Client(address) as silent:
        stranger.sendall(bytes(100))
        silent.send(("echo", (1,)))
        assert served.calls().call("echo", 2) == (2,)  # strangers hold nobody up
    assert endpoint.called == [(2,)]


def test_silent_strangers_in_any_number_do_not_keep_a_worker_out(served: ServedEndpoint) -> None:
    address: Any = served._listener.address
    several = range(endpoint_calls._MAX_UNPROVED + 8)
    with ExitStack() as silent:
        first, *_ = [silent.enter_context(socket.create_connection(address)) for _ in several]
        assert served.calls().call("echo", 4) == (4,)
        first.settimeout(60)
        while first.recv(1000):  # its challenge, and then the end: it took longest
            pass


def test_a_call_that_takes_too_long_is_given_up(served: ServedEndpoint) -> None:
    with pytest.raises(EndpointLostError, match="within"):
        served.calls().call("wait", timeout_s=0.01)


def test_a_endpoint_that_is_gone_is_said_to_be() -> None:
    with closing(ServedEndpoint(Endpoint(), "127.0.0.1")) as other:  # type: ignore[arg-type]
        calls = other.calls()
    with pytest.raises(EndpointLostError):
        calls.call("echo")
