"""`cleave join`: connect this machine to a parameter server as a device."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from cleave.device.policy import parse_memory, parse_policy
from cleave.errors import CleaveError, UsageError, choice_of
from cleave.protocol import limits
from cleave.protocol.messages import clean
from cleave_cli.render.text import printable

if TYPE_CHECKING:
    from cleave.device.credentials import SavedCredentials
    from profiles.device_profile import DeviceKind

_MOST_THREADS = 1024
_NO_TLS = "no TLS: anyone on this network can read and change what devices send"
_OF_ACCELERATOR = 0.9  # share of an accelerator's free memory to offer

Url = Annotated[str, Argument(help="Join URL that `cleave serve` prints, or @FILE with this URL.")]
UrlOrNone = Annotated[
    str,
    Argument(
        help="Join URL that `cleave serve` prints, or @FILE with this URL. Default: find the "
        "servers on this network that were started with --announce, and ask which to join.",
        show_default=False,
    ),
]
Name = Annotated[str, Option(help="Name of this device.")]
BackendName = Annotated[
    str,
    Option(
        "--backend",
        "--executor",
        help="Backend for multiplications: auto (the processor of --runner, if given), cpu, numpy, "
        "torch, torch:cpu, cuda, mps or xpu. "
        "(--executor is the old name.)",
    ),
]
RunnerName = Annotated[
    str,
    Option(
        "--runner",
        "--provider",
        help="Runner for graphs of layers: auto (the processor of --backend, if given), cpu, "
        "webgpu, torch, torch:cpu, cuda, mps or xpu. "
        "(--provider is the old name.)",
    ),
]
Memory = Annotated[str, Option(help="Memory to offer for arrays: 1000 (MB), 4GB or 50%.")]
Threads = Annotated[int, Option(help="Threads for multiplications; 0 uses one per usable core.")]
Cores = Annotated[int, Option(help="Maximum number of cores to use; 0 uses all.")]
When = Annotated[str, Option(help="When to work: idle, charging, idle,charging (both), or always.")]
Hours = Annotated[str, Option(help="Work only in these local hours, such as 22-7.")]
MaxTemp = Annotated[float, Option(help="Stop above this many degrees Celsius; 0 means no limit.")]
MaxData = Annotated[
    str,
    Option(
        help="Traffic limit, such as 500MB/hour, 5GB/day or 50GB/month, or 5GB for the whole run."
    ),
]
Once = Annotated[bool, Option("--once", help="Serve one session: do not reconnect.")]
Profile = Annotated[
    str, Option(help="Profile of this device, from cleave profile list, to model energy.")
]
Kind = Annotated[
    str,
    Option(
        help="Kind of this device, to model energy: phone, tablet, laptop, desktop, sbc, server or "
        "cloud-gpu. Default: detected from its case, battery and processor."
    ),
]
IdleAfter = Annotated[
    float, Option(help="Minutes without input after which this machine counts as idle.")
]


def join(
    url: UrlOrNone = "",
    name: Name = "",
    backend: BackendName = "auto",
    runner: RunnerName = "auto",
    memory: Memory = "1000",
    threads: Threads = 0,
    cores: Cores = 0,
    when: When = "",
    hours: Hours = "",
    max_temp: MaxTemp = 0,
    idle_after: IdleAfter = 5,
    max_data: MaxData = "",
    once: Once = False,
    profile: Profile = "",
    kind: Kind = "",
    as_json: Annotated[bool, Option("--json", help="JSON lines on stdout.")] = False,
) -> None:
    """Make this machine a device that computes for a parameter server until you press Ctrl-C.

    The device reconnects after a lost connection or a server restart, first within a second and
    then at growing intervals, until the server permanently refuses the device. With --once, the
    device leaves after its first session.

    With --when, --hours, --max-temp or --max-data, the device is connected only while these
    conditions allow it to work. See docs/idle.md.

    Examples:

      cleave join 'http://192.168.1.20:8765/join#c=...'

      cleave join

      cleave join URL --threads 2 --memory 4GB

      cleave join @~/.config/cleave/join.url --when idle,charging --hours 22-7
    """
    from cleave.device import owner
    from cleave.machine.sensors import total_memory_bytes

    known_threads(threads)
    policy = parse_policy(when, hours, max_temp, idle_after, max_data)
    if once and policy is not None:
        raise UsageError(
            "--once cannot be combined with --when, --hours, --max-temp or --max-data, which need "
            "several sessions"
        )
    memory_bytes = parse_memory(memory, total_memory_bytes())
    known_profile(profile)
    known_length(name)
    stated = known_kind(kind)
    if cores:
        owner.keep_to_cores(cores)
    if threads or cores:  # math libraries read these variables on import
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(threads or cores)

    import asyncio
    import signal

    from cleave.arrays import DType
    from cleave.device.agent import Agent, AgentSession, Look, Notice, ServerSelection, State
    from cleave.device.compute_thread import ComputeThread
    from cleave.device.credentials import SavedCredential, SavedCredentials, state_folder
    from cleave.device.policy import DataMeter, Gate, Permission, require_visible
    from cleave.device.session import DeviceSession, Keeping, check_admission, device_hello
    from cleave.machine import graph_session
    from cleave.machine.backends import Speed, choose, known_name
    from cleave.machine.gpu_sensors import GpuSensors
    from cleave.machine.graph_choice import GraphChoice, one_processor
    from cleave.machine.graph_speed import LEAST_MEMORY_BYTES
    from cleave.machine.load import OtherLoad
    from cleave.machine.sensors import (
        PowerMeter,
        Sensors,
        SessionEnergy,
        hold_strips_well,
        kind_of,
        on_android,
        this_machine,
    )
    from cleave.protocol.device_counters import DeviceCounters
    from cleave.protocol.messages import Welcome
    from cleave.transport.connection import open_connection
    from cleave.transport.join_url import parse_join_url, read_url

    tiles_on, asked = one_processor(backend, runner)
    called = name or socket.gethostname()
    saved = SavedCredentials(state_folder())
    if not url:
        try:
            url = _chosen_server(saved, called)
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            raise UsageError(
                "`cleave join` without a URL asks which server to join, but nobody answers here; "
                "pass the join URL that `cleave pair` prints"
            ) from None
    parse_join_url(read_url(url))
    give_back = hold_strips_well()
    own_kind = stated or kind_of(this_machine(), android=on_android())
    # The speeds of the backend and of layer graphs, measured when the policy first permits it.
    chosen: list[Speed] = []
    in_graphs: dict[DType | None, float] = {}  # by the dtype of matrix products
    under_load: list[str] = []

    total = DeviceCounters()

    def event(kind: str, human: str, **fields: object) -> None:
        if as_json:
            typer.echo(json.dumps({"event": kind, **fields}))
        else:
            typer.echo(printable(human), err=True)

    def note(text: str) -> None:
        event("note", text, text=text)

    def say(notice: Notice) -> None:
        nonlocal total
        status, reason = notice.status, notice.reason
        match notice.state:
            case State.WAITING:
                retry = f"; trying again in {notice.retry_s:.0f} s" if notice.retry_s else ""
                event("waiting", f"waiting: {reason}{retry}", reason=reason, retry_s=notice.retry_s)
            case State.READY:
                speed = chosen[0]
                event(
                    "ready",
                    f"joined as {called} ({speed.backend.name}, {speed.flops_per_s / 1e9:.0f} "
                    f"GFLOP/s{''.join(f', measured {load}' for load in under_load)}); Ctrl-C to "
                    f"leave",
                    device=status.device,
                    executor=speed.backend.name,
                    flops_per_s=speed.flops_per_s,
                    measured_under_load="".join(under_load),
                )
            case State.DRAINING:
                event(
                    "draining",
                    f"{reason}: finishing the assigned work; Ctrl-C to leave now",
                    reason=reason,
                )
            case State.LEFT:
                give_back()
                total += status.done
                # Between two sessions, report the totals of all sessions.
                done, of = (status.done, "") if status.device else (total, "in all sessions, ")
                event(
                    "left",
                    f"left ({reason}): {of}{done.blocks} runs, with the server's tests, "
                    f"{done.flops / 1e9:.1f} GFLOP, {done.downlink_bytes / 1e6:.1f} MB down, "
                    f"{done.uplink_bytes / 1e6:.1f} MB up",
                    reason=reason,
                    blocks=done.blocks,
                    flops=int(done.flops),
                    downlink_bytes=done.downlink_bytes,
                    uplink_bytes=done.uplink_bytes,
                )

    if own_kind is None and not profile and not PowerMeter(Sensors()).available:
        note("the kind of this machine is unknown, and so is its energy; use --kind to set it")
    known: list[bool] = []
    graphs = GraphChoice(asked, note)

    server_selection, keeping = ServerSelection(), Keeping()

    def multiplying() -> Speed:
        """Return the backend for tiles: the CPU if a backend that the user did not name fails."""
        try:
            return choose(tiles_on, notify=note)
        except CleaveError as error:
            if known_name(backend) == tiles_on:
                raise
            note(f"{error}; tiles are multiplied on the CPU")
            return choose("cpu", notify=note)

    async def connect(ready: Callable[[int], None]) -> AgentSession:
        nonlocal memory_bytes
        if not chosen:
            home = parse_join_url(read_url(url))
            credential, code = saved.keys(home, called)
            hello = device_hello(
                credential=credential, join_code=code, name=called, memory_bytes=memory_bytes
            )
            await check_admission(await open_connection(home), hello)
            if not as_json:  # programs wait for the event `ready`
                typer.echo("measuring this machine's speed ...", err=True)
            others = OtherLoad()
            chosen.append(multiplying())
            if memory_bytes >= LEAST_MEMORY_BYTES:
                in_graphs.update({each: graphs.flops_per_s(each) for each in (None, DType.BF16)})
                memory_bytes = int(min(memory_bytes, _OF_ACCELERATOR * graphs.memory_bytes))
            if remark := others.remark():
                under_load.append(remark)
        # Read the URL for each connection, because a restarted server may write a new URL.
        home = parse_join_url(read_url(url))
        credential, code = saved.keys(home, called)

        def welcomed(welcome: Welcome) -> None:
            first = not known
            known.append(True)
            if code and not welcome.credential and first:  # only for the first connection
                note(
                    "the server knows this device already, so the join code was not used; if the "
                    "code was made with --own, mark this device on the server instead: "
                    f"cleave devices own {shlex.quote(called)}"
                )
            if welcome.credential and welcome.server:
                kept = SavedCredential(
                    welcome.server, called, home.address, welcome.credential, home.fingerprint
                )
                try:
                    saved.save(kept)
                except CleaveError as error:  # the session works without a saved credential
                    note(str(error))

        hello = device_hello(
            credential=credential,
            join_code=code,
            name=called,
            memory_bytes=memory_bytes,
            flops_per_s=chosen[0].flops_per_s,
            graph_flops_per_s=in_graphs.get(None, 0.0),
            graph_bf16_flops_per_s=in_graphs.get(DType.BF16, 0.0),
            profile=profile,
            kind=own_kind,
            graphs=graph_session.available(),
        )
        connect = partial(open_connection, memory_bytes=memory_bytes)
        connection = await server_selection.open(home, connect)
        computer = ComputeThread(chosen[0].backend, make_session=graphs)
        energy = SessionEnergy(PowerMeter(Sensors()))
        session = DeviceSession(
            connection, computer, hello, ready, give_back, welcomed, energy.telemetry,
            keeping=keeping,
        )  # fmt: skip
        server_selection.at(session)
        if data is not None:
            data.follow(session)
        return session

    look: Look | None = None
    data: DataMeter | None = None
    if policy is not None:
        sensors, gate, lent = owner.this_machine(), Gate(policy), policy
        gpus = GpuSensors(owner.run_command)
        require_visible(policy, owner.observe(sensors, policy))
        owner.step_aside()
        if policy.data_cap is not None:
            data = DataMeter(policy.data_cap, saved.folder.parent / "data.json")

        async def look_at_machine() -> Permission:
            used = data.used() if data is not None else 0
            seen = await asyncio.to_thread(owner.observe, sensors, lent, data_bytes=used, gpus=gpus)
            found = gate.decide(seen)
            return found if data is None else replace(found, until_s=data.until_s())

        look = look_at_machine

    async def run() -> None:
        guest = Agent(connect, say, look=look, once=once)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if sys.platform == "win32":  # event loops on Windows do not support signal handlers
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(guest.stop))
            else:
                loop.add_signal_handler(number, guest.stop)
        await guest.run()

    asyncio.run(run())


def _chosen_server(saved: SavedCredentials, called: str) -> str:
    """Find servers on this network, and return the join URL of the one that the user chooses.

    Args:
        saved: credentials for servers that this device has joined before. These need no join code.
        called: name of this device.

    Raises:
        CleaveError: if no server is found, or the chosen one cannot be reached.
        typer.Abort: if the input ends without an answer, or the user presses Ctrl-C.
        typer.Exit: if the user declines.
    """
    from cleave.transport.discovery import answering, find_servers

    typer.echo("looking for servers on this network ...", err=True)
    found = find_servers()
    if not found:
        raise CleaveError(
            "no server on this network answers; start one with `cleave serve --host 0.0.0.0 "
            "--announce`, or use the join URL that `cleave pair` prints"
        )
    for number, server in enumerate(found, start=1):
        title = f" ({server.title})" if server.title else ""
        certificate = server.fingerprint or "from a certificate authority"
        shown = f"certificate {certificate}" if server.secure else _NO_TLS
        # Without line breaks, so that a name or title cannot look like another server.
        typer.echo(clean(f"{number}: {server.name}{title}, port {server.port}"), err=True)
        typer.echo(f"   {shown}", err=True)
    typer.echo(
        "\nAnyone on this network can announce a server. Join a server only if its own terminal "
        "shows the same certificate.",
        err=True,
    )
    chosen: int = typer.prompt(
        "Number of the server to join; 0 for none", default=0, type=int, err=True
    )
    if chosen == 0:
        raise typer.Exit
    if not 0 < chosen <= len(found):
        raise UsageError(f"there is no server {chosen}; choose a number from 1 to {len(found)}")
    server = found[chosen - 1]
    address = answering(server)
    if not address:
        places = ", ".join(server.addresses)
        raise CleaveError(
            f"{clean(server.name)} does not answer at any of its addresses ({places}; port "
            f"{server.port}); check its firewall"
        )
    if saved.find(server.url(address), called):
        return server.url(address).text
    code: str = typer.prompt("Join code, which `cleave pair` prints on the server", err=True)
    return server.url(address, code.strip()).text


def known_threads(threads: int) -> None:
    """Raise UsageError if `--threads` is below 0 or above `_MOST_THREADS`."""
    if not 0 <= threads <= _MOST_THREADS:
        raise UsageError(
            f"--threads must be between 0 (for one thread per core) and {_MOST_THREADS}, not "
            f"{threads}"
        )


def known_kind(name: str) -> DeviceKind | None:
    """Return the kind of device for `--kind`; None if empty. Raise UsageError if it is unknown."""
    from profiles.device_profile import DeviceKind

    return choice_of(DeviceKind, "--kind", name) if name else None


def known_length(name: str) -> None:
    """Raise UsageError if `--name` exceeds `limits.MAX_TEXT` characters."""
    if len(name) > limits.MAX_TEXT:
        raise UsageError(f"--name has {len(name):,} characters; use at most {limits.MAX_TEXT:,}")


def known_profile(name: str) -> None:
    """Raise UsageError if `--profile` is neither empty nor the name of a profile in the library."""
    from profiles.library import load_profiles

    if name and name not in load_profiles():
        raise UsageError(
            f"--profile {name!r} is not in the library; use a name from cleave profile list"
        )
