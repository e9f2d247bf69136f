"""Connections to Ray, for training on several servers and for simulations."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from typing import Any, Final

from cleave.errors import UsageError, not_installed, to_install

_KNOCK_S: Final = 5.0
_RAYS_CORE: Final = "ray._raylet"  # Ray's compiled module, which no other package contains


def need_ray(option: str) -> None:
    """Check that Ray is installed, and that `import ray` imports Ray and no other module.

    Args:
        option: the command-line option that needs Ray, for the error message.

    Raises:
        UsageError: if Ray is not installed, or another module is named `ray`.
    """
    found = importlib.util.find_spec("ray")
    if found is None:
        raise not_installed(option, "Ray", "ray")
    places = list(found.submodule_search_locations or ())
    if PathFinder.find_spec(_RAYS_CORE, places) is None:
        where = places[0] if places else found.origin
        raise UsageError(
            f"{option} needs Ray, but `import ray` would import {str(where)!r}, which is not Ray; "
            f"rename it, or run this in another folder (to install Ray: {to_install('ray')})"
        )


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Connect to a running Ray cluster and yield the module `ray`; disconnect on exit.

    Args:
        address: host:port of the cluster's head node, or "auto" on a machine of the cluster.

    Raises:
        UsageError: if no cluster responds, or the cluster rejects this machine's Ray version or
            authentication token.
    """
    _knock(address)
    with _session(address) as ray:
        try:
            with _own_signals():
                ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
            if address == "auto":
                raise _nobody(address, "") from None
            raise UsageError(
                f"the Ray cluster at {address!r} rejected this machine ({error}); install the "
                "cluster's version of Ray here, and copy ~/.ray/auth_token from the head node "
                "(see docs/scale.md)"
            ) from None
        yield ray


@contextmanager
def ray_here(address: str, cpus: int) -> Iterator[Any]:
    """Start a Ray cluster on this machine and yield the module `ray`; stop the cluster on exit.

    Args:
        address: network address of this machine. Ray hangs with a loopback address.
    """
    with _session(address) as ray:
        with _own_signals():
            ray.init(
                "local",  # not another user's cluster on this machine
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address=address,
            )
        yield ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler on exit, because Ray's handler kills the process immediately."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _session(address: str) -> Iterator[Any]:
    """Import and yield the module `ray`, and shut Ray down on exit.

    Raises:
        UsageError: if the cluster rejects this machine's authentication token.
    """
    # Without a token, a cluster runs code from anyone who can connect.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    # Despite `log_to_driver=False`, Ray prints reports of crashed workers between the records of
    # --json. `cleave.cluster.room` reports crashed workers in one line.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield ray
    except ray.exceptions.AuthenticationError:
        raise UsageError(
            f"the Ray cluster at {address!r} rejected this machine's token; copy "
            "~/.ray/auth_token from the cluster's head node (see docs/scale.md)"
        ) from None
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise UsageError if `address` accepts no TCP connection. Ray itself retries for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise _nobody(address, f" ({error})") from None


def _nobody(address: str, why: str) -> UsageError:
    return UsageError(
        f"no Ray cluster answers at {address!r}{why}; use the host:port of a head node, or start a "
        "cluster with: ray start --head"
    )
