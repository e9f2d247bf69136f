"""Network namespaces of this machine behind rate-limited links: Linux, root.

A link is a veth pair with tbf. A link with delay is a pair of TUN interfaces with tbf, between
which `benchmarks.delayed_link` carries packets.

Every namespace reaches every address of this machine. After `let_reach_one_another`, namespaces
also reach one another through this machine, over the sender's uplink and the receiver's downlink.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cores import LimitedCores, limited_cores
from benchmarks.delayed_link import MTU

MBIT: Final = 125_000.0
"""Bytes per second in 1 Mbit/s."""

_LIMIT: Final = "burst 32kb latency 100ms"


@dataclass(frozen=True)
class LimitedNamespace:
    """A network namespace behind a limited link.

    Attributes:
        name: name of the namespace.
        host, guest: addresses of the link's ends on this machine and inside the namespace.
        here, there: interfaces at the link's ends.
        cores: limit on the cores of processes inside; None for no limit.
    """

    name: str
    host: str
    guest: str
    here: str
    there: str
    cores: LimitedCores | None = None

    def inside(self, *command: str) -> list[str]:
        """Return a command line that runs a command in the namespace, as the same process."""
        linked = ["ip", "netns", "exec", self.name, *command]
        return linked if self.cores is None else self.cores.inside(*linked)

    def passed_bytes(self) -> tuple[int, int]:
        """Return the bytes sent down to the namespace and up from it, including headers."""
        counters = Path("/sys/class/net", self.here, "statistics")
        down, up = ((counters / f"{way}_bytes").read_text() for way in ("tx", "rx"))
        return int(down), int(up)


@contextmanager
def limited_namespace(
    number: int, down: float, up: float, delay_s: float = 0.0, cores: float = 0.0
) -> Iterator[LimitedNamespace]:
    """Yield a network namespace behind a limited link, and delete it after the block.

    Args:
        number: number of the namespace, unique within this process, below 256.
        down, up: rates of the link to and from the namespace, in bytes per second.
        delay_s: additional one-way delay in seconds.
        cores: cores that all processes inside may use together; 0 for all.
    """
    own = os.getpid() % 10_000  # avoids clashes with other runs, including killed ones
    name, here, there = f"cleave-{own}-{number}", f"cv{own}-{number}a", f"cv{own}-{number}b"
    network = f"10.{64 + own % 128}.{number}"
    with ExitStack() as stack:
        group = stack.enter_context(limited_cores(name, cores)) if cores else None
        made = LimitedNamespace(name, f"{network}.1", f"{network}.2", here, there, group)
        stack.callback(_delete, f"ip netns del {name}")
        run_in_shell(f"ip netns add {name}")
        if delay_s:
            stack.enter_context(_delayed_pair(here, there, delay_s))
        else:
            stack.callback(_delete, f"ip link del {here}")
            run_in_shell(f"ip link add {here} type veth peer name {there}")
        run_in_shell(f"ip link set {there} netns {name}")
        run_in_shell(f"ip addr add {made.host}/24 dev {here}")
        run_in_shell(f"ip link set {here} up")
        inside = f"ip netns exec {name}"
        run_in_shell(f"{inside} ip addr add {made.guest}/24 dev {there}")
        run_in_shell(f"{inside} ip link set {there} up")
        run_in_shell(f"{inside} ip link set lo up")
        run_in_shell(f"{inside} ip route add default via {made.host}")
        run_in_shell(f"tc qdisc add dev {here} root tbf rate {down * 8:.0f}bit {_LIMIT}")
        run_in_shell(f"{inside} tc qdisc add dev {there} root tbf rate {up * 8:.0f}bit {_LIMIT}")
        yield made


@contextmanager
def _delayed_pair(here: str, there: str, delay_s: float) -> Iterator[None]:
    """Make two interfaces with a delay between them, both on this machine at first."""
    command = [sys.executable, "-m", "benchmarks.delayed_link", here, there, str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError(f"no delayed link: {' '.join(command)} ended")
        for name in (here, there):
            run_in_shell(f"ip link set {name} mtu {MTU} txqueuelen 2000")
        yield
    finally:
        process.terminate()
        process.wait()


def _delete(command: str) -> None:
    subprocess.run(command.split(), capture_output=True, check=False)


def let_reach_one_another(namespaces: Sequence[LimitedNamespace]) -> None:
    """Make this machine forward packets between namespaces, only on their own interfaces.

    Raises:
        OSError: when the system does not allow it.
    """
    for namespace in namespaces:
        Path("/proc/sys/net/ipv4/conf", namespace.here, "forwarding").write_text("1")


def namespaces_missing() -> str:
    """Return why this machine cannot make namespaces; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "this is not Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with limited_namespace(99, MBIT, MBIT):
            return ""
    except (RuntimeError, OSError) as error:
        return str(error)


def run_in_shell(command: str) -> None:
    """Run a system command; raise an error with its output if it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
