"""Remote calls to endpoints: Ray actors, or the endpoint inside the `cleave serve` process."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Final, Protocol

from cleave.cluster.endpoint import Endpoint
from cleave.errors import CleaveError, FleetError

_BACKLOG: Final = 64
_PAUSE_S: Final = 0.1
_PROVES_S: Final = 10.0  # time limit for a caller to prove that it knows the key, in seconds
_MAX_UNPROVED: Final = 64  # maximum number of callers that are not yet authenticated


class EndpointLostError(Exception):
    """Raised when an endpoint does not respond. Unlike a CleaveError, it makes training restart."""


class EndpointCalls(Protocol):
    """Interface for a client of one endpoint. Clients can be sent to any process of the cluster."""

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the endpoint and return its result.

        Raises:
            CleaveError: if the method raises this error.
            EndpointLostError: if the endpoint's process has exited, or does not respond within
                `timeout_s` seconds.
        """

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method of the endpoint and discard its result."""


def ask_all(
    endpoints: Sequence[EndpointCalls], name: str, *arguments: Any, timeout_s: float
) -> list[Any]:
    """Call several endpoints in parallel and return the results, with None for a lost endpoint."""

    def answer(endpoint: EndpointCalls) -> Any:
        try:
            return endpoint.call(name, *arguments, timeout_s=timeout_s)
        except EndpointLostError:
            return None

    if not endpoints:
        return []
    with ThreadPoolExecutor(len(endpoints)) as threads:
        return list(threads.map(answer, endpoints))


@dataclass(frozen=True, slots=True)
class ActorCalls:
    """A client for an endpoint that is a Ray actor."""

    actor: Any

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, CleaveError) else error from None
        except RayError as lost:
            raise EndpointLostError("its endpoint does not answer; Ray restarts it") from lost

    def tell(self, name: str, *arguments: Any) -> None:
        """Start a method call on the actor, without waiting for the call to end."""
        getattr(self.actor, name).remote(*arguments)


class ConnectionCalls:
    """A thread-safe client for a `ServedEndpoint`. The client authenticates with `key`."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ConnectionCalls, (self._address, self._key)

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method over an idle connection, or over a new connection if none is idle."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = Client(self._address, authkey=self._key)
            connection.send((name, arguments))
            if not connection.poll(timeout_s):
                connection.close()
                raise EndpointLostError(f"the first server did not answer within {timeout_s} s")
            answer, error = connection.recv()
        except (OSError, EOFError, AuthenticationError) as lost:
            raise EndpointLostError(f"the first server does not answer: {lost}") from lost
        with self._lock:
            self._idle.append(connection)
        if error is not None:
            raise error
        return answer

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method, wait until it ends, and discard its result."""
        self.call(name, *arguments)


class ServedEndpoint:
    """A listener for calls from the workers of a cluster to the endpoint in this process.

    Calls are pickled, as in Ray. Unpickling data from an unknown client is unsafe, so callers must
    first prove that they know the key. Other nodes must reach this machine at `host`.
    """

    def __init__(self, endpoint: Endpoint, host: str) -> None:
        self._endpoint = endpoint
        self._key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=_BACKLOG)
        self._closed = False
        self._lock = threading.Lock()
        self._unproved: dict[Connection, None] = {}  # longest-waiting caller first
        self._thread = threading.Thread(target=self._accept, name="cleave-endpoint", daemon=True)
        self._thread.start()

    def calls(self) -> ConnectionCalls:
        """Return a client that other processes can use to call this endpoint."""
        address: Any = self._listener.address
        return ConnectionCalls(address, self._key)

    def close(self) -> None:
        """Stop listening. Callers that are already connected stay connected."""
        self._closed = True
        with suppress(OSError):
            Client(self._listener.address).close()  # wakes the accepting thread
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller = self._listener.accept()
            except OSError:  # one caller failed, or too many files are open
                time.sleep(_PAUSE_S)
                continue
            if self._closed:
                caller.close()
                return
            self._admit(caller)
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _admit(self, caller: Connection) -> None:
        """Register a caller that is not yet authenticated.

        If too many callers are unauthenticated, disconnect the caller that has waited longest. This
        caller is unlikely to be a worker, because workers authenticate immediately.
        """
        with self._lock:
            if len(self._unproved) == _MAX_UNPROVED:
                slowest = next(iter(self._unproved))
                del self._unproved[slowest]
                _hang_up(slowest)
            self._unproved[caller] = None

    def _have_proved(self, caller: Connection) -> None:
        """Authenticate both ends of a connection with the key, within `_PROVES_S` seconds."""
        late = threading.Timer(_PROVES_S, _hang_up, [caller])
        late.daemon = True
        late.start()
        try:
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
        finally:
            late.cancel()

    def _serve(self, caller: Connection) -> None:
        """Authenticate one caller before unpickling anything, then execute its calls."""
        with caller, suppress(OSError, EOFError, AuthenticationError):
            try:
                self._have_proved(caller)
            finally:
                with self._lock:
                    self._unproved.pop(caller, None)
            while True:
                name, arguments = caller.recv()
                answer, error = None, None
                try:
                    answer = getattr(self._endpoint, name)(*arguments)
                except CleaveError as failed:
                    error = failed
                except Exception as failed:  # noqa: BLE001 - raised in the caller's process
                    error = FleetError(f"unexpected {type(failed).__name__}: {failed}")
                caller.send((answer, error))


def _hang_up(caller: Connection) -> None:
    """Shut down a caller's connection, so that the thread that reads from it stops."""
    with suppress(OSError), socket.socket(fileno=os.dup(caller.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
