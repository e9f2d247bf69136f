"""Calls to endpoints in other processes: Ray actors, and the endpoint of `cleave serve`."""

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

from cleave.cluster.door import Door
from cleave.errors import CleaveError, FleetError

_BACKLOG: Final = 64
_PAUSE_S: Final = 0.1
_PROVES_S: Final = 10.0  # for a caller to prove that it knows the key
_MAX_UNPROVED: Final = 64  # callers that have not proved themselves


class DoorLostError(Exception):
    """An endpoint's process does not answer. The worker restarts, and so do all other workers.

    This is no `CleaveError`, which would end the training.
    """


class DoorCalls(Protocol):
    """Calls an endpoint. Other processes of the cluster can receive it."""

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the endpoint and return its result.

        Args:
            name: name of the method.
            arguments: arguments of the method.
            timeout_s: seconds to wait for the answer; None to wait indefinitely.

        Raises:
            CleaveError: as raised by the method.
            DoorLostError: when the process is gone or does not answer in time.
        """
        ...

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method whose result is not needed."""
        ...


def ask_all(doors: Sequence[DoorCalls], name: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """Call a method of several endpoints in parallel; return the answers, None for lost ones.

    An endpoint that does not answer delays no other, and the caller only by the timeout.
    """

    def answer(door: DoorCalls) -> Any:
        try:
            return door.call(name, *arguments, timeout_s=timeout_s)
        except DoorLostError:
            return None

    if not doors:
        return []
    with ThreadPoolExecutor(len(doors)) as threads:
        return list(threads.map(answer, doors))


@dataclass(frozen=True, slots=True)
class ActorCalls:
    """Calls an endpoint that is a Ray actor."""

    actor: Any

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the actor and return its result."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, CleaveError) else error from None
        except RayError as lost:
            raise DoorLostError("its door does not answer, and is started again by Ray") from lost

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method of the actor without waiting."""
        getattr(self.actor, name).remote(*arguments)


class ConnectionCalls:
    """Calls an endpoint served by `ServedDoor`. Thread-safe.

    Args:
        address: host and port.
        key: secret that proves that the caller belongs to the cluster.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._address, self._key = address, key
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return ConnectionCalls, (self._address, self._key)

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method over an idle or new connection and return its result."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = Client(self._address, authkey=self._key)
            connection.send((name, arguments))
            if not connection.poll(timeout_s):
                connection.close()
                raise DoorLostError(f"the first server does not answer within {timeout_s} s")
            answer, error = connection.recv()
        except (OSError, EOFError, AuthenticationError) as lost:
            raise DoorLostError(f"the first server does not answer: {lost}") from lost
        with self._lock:
            self._idle.append(connection)
        if error is not None:
            raise error
        return answer

    def tell(self, name: str, *arguments: Any) -> None:
        """Call a method and wait for it, but return nothing."""
        self.call(name, *arguments)


class ServedDoor:
    """Serves this process's endpoint to a cluster's workers until it is closed.

    Data is pickled, as Ray does with all data. So only holders of the key may call.

    Args:
        door: endpoint of this process.
        host: address of this machine that other nodes can reach.
    """

    def __init__(self, door: Door, host: str) -> None:
        self._door = door
        self._key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=_BACKLOG)
        self._closed = False
        self._lock = threading.Lock()
        self._unproved: dict[Connection, None] = {}  # oldest caller first
        self._thread = threading.Thread(target=self._accept, name="cleave-door", daemon=True)
        self._thread.start()

    def calls(self) -> ConnectionCalls:
        """Return an object that calls this endpoint from other processes."""
        address: Any = self._listener.address
        return ConnectionCalls(address, self._key)

    def close(self) -> None:
        """Accept no more callers."""
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
        """Let a caller prove itself; when too many are unproved, hang up on the oldest one.

        Workers prove themselves immediately, so no number of strangers can keep them out.
        """
        with self._lock:
            if len(self._unproved) == _MAX_UNPROVED:
                slowest = next(iter(self._unproved))
                del self._unproved[slowest]
                _hang_up(slowest)
            self._unproved[caller] = None

    def _have_proved(self, caller: Connection) -> None:
        """Have a caller prove in time that it knows the key, and prove the same to the caller."""
        late = threading.Timer(_PROVES_S, _hang_up, [caller])
        late.daemon = True
        late.start()
        try:
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
        finally:
            late.cancel()

    def _serve(self, caller: Connection) -> None:
        """Serve one caller until it leaves; nothing is unpickled before it has proved itself."""
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
                    answer = getattr(self._door, name)(*arguments)
                except CleaveError as failed:
                    error = failed
                except Exception as failed:  # noqa: BLE001 - raised where it was called
                    error = FleetError(f"unexpected {type(failed).__name__}: {failed}")
                caller.send((answer, error))


def _hang_up(caller: Connection) -> None:
    """Shut a silent connection, so that its reader sees the end."""
    with suppress(OSError), socket.socket(fileno=os.dup(caller.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
