"""A connection to Ray, for trainings on several servers and for simulations."""

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
_RAYS_CORE: Final = "ray._raylet"  # a compiled module, which nothing else has


def need_ray(option: str) -> None:
    """Refuse an option that needs Ray where that is not installed, or something else has its name.

    Raises:
        UsageError: when it is so.
    """
    found = importlib.util.find_spec("ray")
    if found is None:
        raise not_installed(option, "Ray", "ray")
    places = list(found.submodule_search_locations or ())
    if PathFinder.find_spec(_RAYS_CORE, places) is None:
        where = places[0] if places else found.origin
        raise UsageError(
            f"{option} needs Ray, and Python takes {str(where)!r} for it, which is something else; "
            "rename that, or run this in another folder (Ray is installed with: "
            f"{to_install('ray')})"
        )


@contextmanager
def ray_cluster(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster that runs already; yield the module `ray`.

    Args:
        address: of its head node as Ray writes it, host:port, or "auto" on one of its nodes.

    Raises:
        UsageError: when no cluster is there, or it wants another token.
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
                f"the Ray cluster at {address!r} does not take this machine ({error}); both need "
                "the same version of Ray, and ~/.ray/auth_token of the head node, as "
                "docs/scale.md says"
            ) from None
        yield ray


@contextmanager
def ray_here(address: str, cpus: int) -> Iterator[Any]:
    """Start a Ray cluster of this machine, which ends with the block; yield the module `ray`.

    Args:
        address: of this machine in a network: on loopback Ray hangs.
        cpus: that it says it has.
    """
    with _session(address) as ray:
        with _own_signals():
            ray.init(
                "local",  # not a cluster that somebody else runs on this machine
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
                _node_ip_address=address,
            )
        yield ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep what this process does at SIGTERM: Ray would have it end at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _session(address: str) -> Iterator[Any]:
    """Yield the module `ray`; leave the cluster afterwards.

    Raises:
        UsageError: when the cluster wants another token.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster without one obeys anybody
    import ray

    # What Ray says of lost processes would be on stdout, between records of --json, for all that
    # `log_to_driver` is off. `cleave.cluster.ray_errors` says it in short.
    ray._private.worker._worker_logs_enabled = False
    try:
        yield ray
    except ray.exceptions.AuthenticationError:
        raise UsageError(
            f"the Ray cluster at {address!r} wants another token than this machine has; copy "
            "~/.ray/auth_token of its head node here, as docs/scale.md says"
        ) from None
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Find out whether somebody listens there: Ray itself takes minutes to give up.

    Raises:
        UsageError: when nobody does, or it is no address.
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise _nobody(address, f" ({error})") from None


def _nobody(address: str, why: str) -> UsageError:
    return UsageError(
        f"no Ray cluster answers at {address!r}{why}; give host:port of its head node, or start "
        "one with: ray start --head"
    )
