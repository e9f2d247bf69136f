"""Train between two homes, each behind a NAT of its own, in each way that the documents describe.

    python -m benchmarks.between_homes [--ways forward ssh wireguard socat caddy] [--steps 3]

Linux, root. Needs `nft`; `sshd` and `ssh` for `ssh`; `wg-quick` for `wireguard` and the relays,
with a kernel module or `wireguard-go`; and `socat`, `haproxy`, `nginx` (Debian: also
`libnginx-mod-stream`) or `caddy` for the ways with their names. Their configurations are those of
docs/how-to/between-homes.md. Makes five network namespaces: a server and a device, a home router
with NAT for each, and a public host between the routers.

For each way, the server prints a join URL, a device joins with it and trains whole layers, and the
tunnel of `ssh` is cut once. Prints seconds until the device is ready and per step, bytes per step
at the server's home and at the public host, and the difference of the losses from those of the
server alone. Ends with 1 if a device reaches the server without a way, or if losses differ by more
than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common import machine
from benchmarks.links import namespaces_missing, run_in_shell
from benchmarks.side_by_side.method import LOSS_LIMITS
from benchmarks.side_by_side.processes import Processes, Started
from cleave.transport.tls import make_certificate

_CLEAVE: Final = (sys.executable, "-m", "cleave_cli")
_JOB: Final = ("--model", "opt-tiny", "--batch", "4", "--seq", "128")
_PORT: Final = 8765
_SERVER_HOME, _DEVICE_HOME, _PUBLIC = "198.51.100.1", "198.51.100.2", "198.51.100.3"
_HUB, _SERVER_INSIDE, _DEVICE_INSIDE = "10.8.0.1", "10.8.0.2", "10.8.0.3"  # addresses in WireGuard
_LONGEST_S: Final = 1800.0

_NAT: Final = """
table ip home {{
  chain nat {{ type nat hook postrouting priority srcnat; oifname "wan" masquerade; }}
  chain ports {{ type nat hook prerouting priority dstnat; {forwarded} }}
  chain through {{
    type filter hook forward priority filter; policy drop;
    iifname "lan" accept
    ct state established,related accept
    ct status dnat accept
  }}
  chain own {{
    type filter hook input priority filter; policy drop;
    iifname {{ "lo", "lan" }} accept
    ct state established,related accept
  }}
}}
"""
_FORWARDED: Final = f'iifname "wan" tcp dport {{ 443, {_PORT} }} dnat to 192.168.1.2;'
_PAGE: Final = Path(__file__).parents[1] / "docs" / "how-to" / "between-homes.md"
_NAME: Final = "relay.example.org"  # in the documents; the address is `_SERVER_HOME`
_STREAM: Final = "/usr/lib/nginx/modules/ngx_stream_module.so"  # where Debian's nginx has it


class Way(Enum):
    """A way between homes; the values are those of `--ways`."""

    FORWARD = "forward"  # the router of the server's home forwards a port
    SSH = "ssh"  # the server keeps a tunnel to the public host
    WIREGUARD = "wireguard"  # server and device are in one WireGuard network
    # Only server and public host are in it, and the public host passes bytes on.
    SOCAT = "socat"
    HAPROXY_TCP = "haproxy-tcp"
    NGINX_TCP = "nginx-tcp"
    # A proxy on the server's machine ends TLS, and the router forwards its port.
    CADDY = "caddy"
    NGINX = "nginx"
    HAPROXY = "haproxy"

    @property
    def relays(self) -> bool:
        """Whether the public host passes on encrypted bytes."""
        return self in (Way.SOCAT, Way.HAPROXY_TCP, Way.NGINX_TCP)

    @property
    def ends_tls(self) -> bool:
        """Whether a reverse proxy decrypts."""
        return self in (Way.CADDY, Way.NGINX, Way.HAPROXY)

    @property
    def program(self) -> str:
        """The relay or proxy."""
        return self.value.removesuffix("-tcp")

    def needs(self) -> tuple[str, ...]:
        """Return the programs that this way needs."""
        if self.relays:
            return ("nft", "wg", "wg-quick", self.program)
        if self.ends_tls:
            return ("nft", self.program)
        return {
            Way.FORWARD: ("nft",),
            Way.SSH: ("nft", "sshd", "ssh", "ssh-keygen"),
            Way.WIREGUARD: ("nft", "wg", "wg-quick"),
        }[self]


@dataclass
class Homes:
    """The namespaces of two homes and of the public host between them."""

    prefix: str

    def name(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self.prefix}-{host}"

    def inside(self, host: str, *command: str) -> list[str]:
        """Return a command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def run(self, host: str, *command: str, given: str = "", **environment: str) -> str:
        """Run a command on a host and return what it prints; raise an error if it fails."""
        done = subprocess.run(
            self.inside(host, *command),
            input=given, capture_output=True, text=True, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def wire(self, host: str, interface: str, to: str, other: str, address: str = "") -> None:
        """Connect two hosts' interfaces, and give the first one an address."""
        ends = f"{interface} netns {self.name(host)} type veth peer name {other}"
        run_in_shell(f"ip link add {ends} netns {self.name(to)}")
        if address:
            self.run(host, "ip", "addr", "add", f"{address}/24", "dev", interface)
        for each, name in ((host, interface), (to, other)):
            self.run(each, "ip", "link", "set", name, "up")

    def forwards(self, host: str) -> None:
        """Make a host pass on packets."""
        self.run(host, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def port(self, *, forwarded: bool) -> None:
        """Set the rules of both routers. If `forwarded`, the server's passes on its port."""
        for router, ports in (("router-a", _FORWARDED if forwarded else ""), ("router-b", "")):
            self.run(router, "nft", "flush", "ruleset")
            self.run(router, "nft", "-f", "-", given=_NAT.format(forwarded=ports))

    def names(self, host: str, addresses: dict[str, str], stack: ExitStack) -> None:
        """Give a host names for addresses, until the stack ends."""
        folder = Path("/etc/netns", self.name(host))
        folder.mkdir(parents=True, exist_ok=True)
        stack.callback(shutil.rmtree, folder)
        lines = ["127.0.0.1 localhost", *(f"{it} {name}" for name, it in addresses.items())]
        (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def passed_bytes(self, host: str, interface: str) -> int:
        """Return the bytes that an interface has sent and received."""
        shown = json.loads(self.run(host, "ip", "-json", "-statistics", "link", "show", interface))
        stats = shown[0]["stats64"]
        return int(stats["rx"]["bytes"]) + int(stats["tx"]["bytes"])

    def reaches(self, host: str, port: int) -> bool:
        """Return whether the device can connect to an address."""
        probe = (
            f"import socket; socket.create_connection(({host!r}, {port}), 3).close(); print('yes')"
        )
        done = subprocess.run(
            self.inside("device", sys.executable, "-c", probe), capture_output=True, check=False
        )
        return done.returncode == 0


@contextmanager
def two_homes() -> Iterator[Homes]:
    """Yield the namespaces of two homes, and delete them after the block."""
    homes = Homes(f"cleave-home-{os.getpid()}")
    with ExitStack() as stack:
        for host in ("public", "router-a", "router-b", "server", "device"):
            run_in_shell(f"ip netns add {homes.name(host)}")
            stack.callback(
                subprocess.run,
                ["ip", "netns", "del", homes.name(host)],
                capture_output=True,
                check=False,
            )
            homes.run(host, "ip", "link", "set", "lo", "up")
        homes.run("public", "ip", "link", "add", "internet", "type", "bridge")
        homes.run("public", "ip", "addr", "add", f"{_PUBLIC}/24", "dev", "internet")
        homes.run("public", "ip", "link", "set", "internet", "up")
        for number, (router, guest, address) in enumerate(
            [("router-a", "server", _SERVER_HOME), ("router-b", "device", _DEVICE_HOME)], start=1
        ):
            homes.wire(router, "wan", "public", f"home{number}", address)
            homes.run("public", "ip", "link", "set", f"home{number}", "master", "internet")
            homes.wire(router, "lan", guest, "eth0", f"192.168.{number}.1")
            homes.run(guest, "ip", "addr", "add", f"192.168.{number}.2/24", "dev", "eth0")
            homes.run(guest, "ip", "route", "add", "default", "via", f"192.168.{number}.1")
            homes.forwards(router)
        homes.port(forwarded=False)
        yield homes


@dataclass
class Travel:
    """Times, traffic and losses of one way."""

    ready_s: float
    step_s: float
    home_bytes: float  # per step, at the router of the server's home
    public_bytes: float  # per step, received and sent by the public host itself
    losses: list[float]


def _sshd(homes: Homes, processes: Processes, folder: Path) -> None:
    """Start the SSH server of the public host. Its only key may listen at one port."""
    for key in ("host", "tunnel"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
        )
    public = (folder / "tunnel.pub").read_text()
    (folder / "authorized").write_text(
        f'restrict,port-forwarding,permitlisten="*:{_PORT}" {public}'
    )
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        f"UsePAM no\nPidFile none\nGatewayPorts clientspecified\nClientAliveInterval 15\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    processes.start(
        "sshd", homes.inside("public", sshd, "-D", "-e", "-f", str(folder / "sshd_config"))
    )
    _until(partial(homes.reaches, _PUBLIC, 22))


def _tunnel(homes: Homes, processes: Processes, folder: Path, name: str) -> Started:
    """Start the server's SSH client, and wait until the public host listens for it."""
    options = ("ServerAliveInterval=15", "ExitOnForwardFailure=yes")
    known = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={folder}/known")
    command = ["ssh", "-N", "-R", f"*:{_PORT}:127.0.0.1:{_PORT}", "-i", str(folder / "tunnel")]
    command += [each for option in (*options, *known) for each in ("-o", option)]
    started = processes.start(name, homes.inside("server", *command, f"root@{_PUBLIC}"))
    processes.may_end.add(name)
    _until(partial(homes.reaches, _PUBLIC, _PORT))
    return started


def _wireguard(homes: Homes, stack: ExitStack, folder: Path, members: Sequence[str]) -> None:
    """Make a WireGuard network of the public host and of hosts behind NAT."""
    inside = {"public": _HUB, "server": _SERVER_INSIDE, "device": _DEVICE_INSIDE}
    keys = {host: homes.run(host, "wg", "genkey").strip() for host in ("public", *members)}
    shown = {host: homes.run(host, "wg", "pubkey", given=key).strip() for host, key in keys.items()}
    for host, key in keys.items():
        own = f"[Interface]\nPrivateKey = {key}\nAddress = {inside[host]}/24\n"
        if host == "public":
            own += "ListenPort = 51820\n"
            for member in members:
                own += f"[Peer]\nPublicKey = {shown[member]}\nAllowedIPs = {inside[member]}/32\n"
        else:
            own += (
                f"[Peer]\nPublicKey = {shown['public']}\nEndpoint = {_PUBLIC}:51820\n"
                f"AllowedIPs = 10.8.0.0/24\nPersistentKeepalive = 25\n"
            )
        # In one machine, interfaces of wireguard-go need different names.
        path = folder / f"wg-{host}.conf"
        path.write_text(own)
        path.chmod(0o600)
        homes.run(
            host, "wg-quick", "up", str(path), WG_QUICK_USERSPACE_IMPLEMENTATION="wireguard-go"
        )
        stack.callback(homes.run, host, "wg-quick", "down", str(path))
    homes.forwards("public")


def _documented(language: str, text: str) -> str:
    """Return the configuration of the documents that is in a language and contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if text in block)
    return str(found)


def _proxy(way: Way, folder: Path) -> tuple[str, ...]:
    """Write the configuration of a relay or proxy. Return the command that starts it.

    A proxy that ends TLS gets the key and certificate in `folder`/proxy.pem.
    """
    file, pem = folder / "proxy.conf", str(folder / "proxy.pem")
    match way:
        case Way.SOCAT:
            return ("socat", f"TCP-LISTEN:{_PORT},fork,reuseaddr", f"TCP:{_SERVER_INSIDE}:{_PORT}")
        case Way.HAPROXY | Way.HAPROXY_TCP:
            block = _documented("haproxy", "mode tcp" if way.relays else "mode http")
            file.write_text(re.sub(r"crt \S+", f"crt {pem}", block))
            return ("haproxy", "-db", "-f", str(file))
        case Way.NGINX | Way.NGINX_TCP:
            block = _documented("nginx", "stream {" if way.relays else "listen 443")
            block = re.sub(r"(ssl_certificate\w*) \S+;", rf"\1 {pem};", block)
            began = f"daemon off;\npid {folder}/nginx.pid;\n"
            if way.relays:
                file.write_text(f"{began}load_module {_STREAM};\nevents {{}}\n{block}")
            else:
                file.write_text(f"{began}events {{}}\nhttp {{\n{block}}}\n")
            return ("nginx", "-e", "stderr", "-p", str(folder), "-c", str(file))
        case _:
            # Only this is different from the documents: there is no authority here to ask.
            block = _documented("caddyfile", "reverse_proxy")
            block = block.replace("    reverse_proxy", f"    tls {pem} {pem}\n    reverse_proxy")
            file.write_text(f"{{\n    admin off\n}}\n{block}")
            return ("caddy", "run", "--adapter", "caddyfile", "--config", str(file))


def _until(condition: Callable[[], bool], longest_s: float = 60.0) -> None:
    """Wait until a condition holds. Raise RuntimeError after `longest_s` seconds."""
    until_s = time.monotonic() + longest_s
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"waited {longest_s:.0f} s in vain for {condition}")
        time.sleep(0.2)


def travel(way: Way, homes: Homes, steps: int, folder: Path) -> Travel:
    """Join and train in one way.

    Args:
        steps: optimizer steps.
        folder: empty folder for keys, logs and the server's data.
    """
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder, time.monotonic() + _LONGEST_S))
        public_url = ("--public-url", f"wss://{_PUBLIC}:{_PORT}")
        where: tuple[str, ...]
        trusts: dict[str, str] = {}
        tunnel: Started | None = None
        match way:
            case Way.FORWARD:
                homes.port(forwarded=True)
                stack.callback(homes.port, forwarded=False)
                where = ("--host", "0.0.0.0", "--public-url", f"wss://{_SERVER_HOME}:{_PORT}")
            case Way.SSH:
                _sshd(homes, processes, folder)
                tunnel = _tunnel(homes, processes, folder, "tunnel")
                where = public_url
            case Way.WIREGUARD:
                _wireguard(homes, stack, folder, ["server", "device"])
                where = ("--host", _SERVER_INSIDE)
            case _ if way.relays:
                _wireguard(homes, stack, folder, ["server"])
                processes.start(way.value, homes.inside("public", *_proxy(way, folder)))
                where = ("--host", _SERVER_INSIDE, *public_url)
            case _:
                homes.port(forwarded=True)
                stack.callback(homes.port, forwarded=False)
                homes.names("device", {_NAME: _SERVER_HOME}, stack)
                pem = make_certificate((_NAME,), datetime.now(UTC))
                (folder / "proxy.pem").write_bytes(pem)
                trusted = folder / "trusted.pem"  # as if an authority had signed it
                trusted.write_bytes(pem[pem.index(b"-----BEGIN CERT") :])
                trusts["SSL_CERT_FILE"] = str(trusted)
                places = {f"XDG_{kind}_HOME": str(folder / "xdg") for kind in ("CONFIG", "DATA")}
                command = homes.inside("server", *_proxy(way, folder))
                processes.start(way.value, command, **places)
                _until(partial(homes.reaches, _SERVER_HOME, 443))
                where = ("--tls", "off", "--public-url", f"wss://{_NAME}")
        data = str(folder / "data")
        serving = (*_CLEAVE, "serve", *where, "--data", data, "--compute", "off", "--json")
        serving += ("--runs", str(folder / "runs"))
        server = processes.start("server", homes.inside("server", *serving))
        processes.await_record(server, lambda record: record["event"] == "listening")

        def ask(*words: str) -> dict[str, Any]:
            shown = homes.run("server", *_CLEAVE, *words, "--data", data, "--json")
            answer: dict[str, Any] = json.loads(shown)
            return answer

        url = ask("pair", "--own")["page_url"]
        began_s = time.monotonic()
        joining = (*_CLEAVE, "join", url, "--runner", "cpu", "--memory", "2GB", "--json")
        device = processes.start(
            "device",
            homes.inside("device", *joining),
            CLEAVE_STATE=str(folder / "state"),
            **trusts,
        )
        processes.await_record(device, lambda record: record["event"] == "ready")
        ready_s = time.monotonic() - began_s

        def present() -> bool:
            return [each["state"] for each in ask("devices")["devices"]] == ["ready"]

        if tunnel is not None:  # it is cut, as by a reboot of the public host, and made again
            tunnel.process.kill()
            _until(lambda: not present())
            _tunnel(homes, processes, folder, "tunnel-again")
        _until(present)
        before = homes.passed_bytes("router-a", "wan"), homes.passed_bytes("public", "internet")
        training = [*_CLEAVE, "train", *_JOB, "--method", "stages", "--steps", str(steps)]
        training += ["--server", f"@{data}/operator.url", "--json"]
        found = list(processes.records(processes.start("train", homes.inside("server", *training))))
        home, public = (
            (homes.passed_bytes(host, name) - first) / steps
            for (host, name), first in zip(
                [("router-a", "wan"), ("public", "internet")], before, strict=True
            )
        )
        losses, step_s = _steps(found)
        return Travel(ready_s, step_s, home, public, losses)


def _steps(records: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Return the losses of a job, and the median duration of its steps after the first."""
    steps = [record for record in records if record["event"] == "step"]
    seconds = [float(step["wall_s"]) for step in steps]
    return [float(step["loss"]) for step in steps], statistics.median(seconds[1:] or seconds)


def alone(steps: int, folder: Path) -> tuple[list[float], float]:
    """Return the losses of the server alone, and the duration of a step."""
    with Processes(folder, time.monotonic() + _LONGEST_S) as processes:
        command = (*_CLEAVE, "train", *_JOB, "--devices", "0", "--steps", str(steps), "--json")
        job = processes.start("alone", (*command, "--runs", str(folder / "runs")))
        return _steps(list(processes.records(job)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    every = [way.value for way in Way]
    parser.add_argument("--ways", nargs="+", choices=every, default=every)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if why := namespaces_missing():
        raise SystemExit(f"not measured: {why}")
    ways = [Way(name) for name in options.ways]
    wanted = {program for way in ways for program in way.needs()}
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := sorted(program for program in wanted if not shutil.which(program, path=path)):
        raise SystemExit(f"not measured: {', '.join(missing)} not installed")
    os.environ["PATH"] = path
    print(f"{machine()}; OPT-tiny, 4 x 128 tokens, one device, links without limits")
    with two_homes() as homes, tempfile.TemporaryDirectory() as root:
        for host in ("192.168.1.2", _SERVER_HOME, _PUBLIC):
            if homes.reaches(host, _PORT):
                raise SystemExit(f"the device reaches {host} without a tunnel or forwarded port")
        print("without a tunnel or forwarded port, the device does not reach the server")
        reference, step_s = alone(options.steps, Path(root))
        print(f"server alone: {step_s:.2f} s a step, loss {reference[-1]:.4f}")
        worst = 0.0
        for way in ways:
            folder = Path(root, way.value)
            folder.mkdir()
            found = travel(way, homes, options.steps, folder)
            apart = max(
                abs(loss - other) / other
                for loss, other in zip(found.losses, reference, strict=True)
            )
            worst = max(worst, apart)
            print(
                f"{way.value}: ready after {found.ready_s:.1f} s, {found.step_s:.2f} s a step, "
                f"{found.home_bytes / 1e6:.1f} MB a step at home, {found.public_bytes / 1e6:.1f} "
                f"MB through the public host, losses differ by {apart:.1e}",
                flush=True,
            )
    raise SystemExit(1 if worst > LOSS_LIMITS["fp32"] else 0)


if __name__ == "__main__":
    main()
