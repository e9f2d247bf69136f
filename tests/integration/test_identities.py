"""Real servers on a folder, real devices: codes, credentials, restarts, quarantine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.device.compute_thread import Computer, ComputeThread
from cleave.device.session import DeviceSession, RefusedError, device_hello
from cleave.fleet.fleet import Fleet
from cleave.machine.backends import NumpyBackend
from cleave.protocol import messages
from cleave.protocol.messages import ErrorCode
from cleave.server.app import App
from cleave.server.fleet_server import Server
from cleave.transport.connection import open_connection
from cleave.transport.join_url import parse_join_url
from tests.disks import small_disk
from tests.integration.emulation import DEVICE, Emulation, check, emulation, submit
from tests.integration.processes import (
    CLEAVE,
    JOIN,
    PATIENCE_S,
    here,
    records,
    started,
    until,
    wait_for_event,
)
from tests.integration.serving import served
from tests.integration.test_verification import Liar, stale

Lines = Iterator[dict[str, Any]]


class Device:
    """A `cleave join` process."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors

    def ready(self) -> None:
        """Wait until it has joined."""
        self.event("ready")

    def event(self, name: str) -> dict[str, Any]:
        """Wait until it says so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["event"] == name:
                return said
        raise AssertionError(f"it never was {name}: {self._errors.read_text()}")

    def end(self) -> str:
        """Wait until it ends by itself, refused; what it said."""
        assert self.process.wait(PATIENCE_S) == 1
        said = self._errors.read_text()
        assert "Traceback" not in said
        return said


class Place:
    """A server's folder, and the machines of its devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self._count = 0

    @contextmanager
    def server(self, port: str = "0") -> Iterator[tuple[subprocess.Popen[str], Lines, str]]:
        """A server on the folder: process, what it prints, its first join URL."""
        command = ("serve", "--port", port, "--data", str(self.data), "--json")
        with started(*command, cwd=self.root) as (process, lines):
            yield process, lines, wait_for_event(lines, "listening")["url"]

    @contextmanager
    def server_here(self, port: int = 0) -> Iterator[str]:
        """A server on the folder in this process, which takes less time; a join URL."""
        with served(self.root / "runs", str(self.data), port):
            yield self.ask("pair")["url"]

    def ask(self, *words: str) -> dict[str, Any]:
        """A command for the server's operator."""
        done = here(*words, "--data", str(self.data), "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def states(self) -> dict[str, str]:
        """Of every device that the server knows, once none is probed any more."""
        # A device says that it is ready when it is let in, before it was probed.
        until(lambda: all(device["state"] != "probing" for device in self._devices()))
        return {d["name"]: d["state"] for d in self._devices()}

    def own(self) -> dict[str, bool]:
        """Whether it is the operator's own, of every device that the server knows."""
        return {d["name"]: d["own"] for d in self._devices()}

    def _devices(self) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = self.ask("devices")["devices"]
        return devices

    @contextmanager
    def device(self, url: str, name: str) -> Iterator[Device]:
        """A device on a machine of its own, as far as it knows."""
        self._count += 1
        errors = self.root / f"errors-{self._count}"
        environment = {
            **os.environ,
            "CLEAVE_STATE": str(self.root / name),
            "OMP_NUM_THREADS": "1",
        }
        with errors.open("w") as file:
            process = subprocess.Popen(
                [*CLEAVE, "join", url, *JOIN, "--name", name],
                stdout=subprocess.PIPE, stderr=file, text=True, env=environment,
            )  # fmt: skip
        try:
            yield Device(process, errors)
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def emulated(url: str, name: str) -> AbstractContextManager[Emulation]:
    """A device in this process, for tests in which no process and no machine matters."""
    return emulation(url, [replace(DEVICE, name=name)])


def never(device: int) -> None:
    """Called with the id of a device that is let in."""
    raise AssertionError("it was let in")


def refusal(url: str) -> str:
    """What a device that is refused hears."""
    with pytest.raises(RefusedError) as refused:
        asyncio.run(KnownDevice("stranger").serve(url, ComputeThread(NumpyBackend()), never))
    return str(refused.value)


def test_a_code_is_for_one_device_which_is_known_from_then_on(place: Place) -> None:
    with place.server() as (server, lines, url):
        with place.device(url, "anna") as anna:
            anna.ready()
            next_url = wait_for_event(lines, "join_code")["url"]
            assert next_url != url
            assert "used already" in refusal(url)
            with place.device(next_url, "ben") as ben:
                ben.ready()
                assert place.states() == {"anna": "ready", "ben": "ready"}
            anna.process.send_signal(signal.SIGTERM)
            assert anna.process.wait(PATIENCE_S) == 0
        with place.device(url, "anna") as anna:  # its code is used up, its credential is not
            anna.ready()
            place.ask("devices", "revoke", "anna", "--reason", "sold")
            assert "revoked this device's credential: sold" in anna.end()
        with place.device(url, "anna") as anna:
            assert "credential was revoked: sold" in anna.end()
        assert place.states()["anna"] == "revoked"
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


def test_who_is_revoked_does_not_come_back_with_the_same_code(place: Place) -> None:
    """Not even on another machine under another name; who came by it before stays.

    The code is for devices of the operator's own, and one of these is not any more.
    """
    with place.server_here():
        code = place.ask("pair", "--own", "--uses", "9", "--minutes", "60")
        spare = place.ask("pair", "--uses", "2")
        with emulated(code["url"], "anna") as anna, emulated(code["url"], "ben"):
            until(lambda: place.states() == {"anna": "ready", "ben": "ready"})
            assert place.own() == {"anna": True, "ben": True}
            shown = here("devices", "own", "ben", "--no", "--data", str(place.data))
            assert "ben is no longer your own" in shown.stderr
            assert place.own() == {"anna": True, "ben": False}
            shown = here("devices", "revoke", "anna", "--data", str(place.data))
            assert f"its join code ({code['id']}) is now void, too" in shown.stderr
            assert "cleave pair --uses 7 --own" in shown.stderr  # of the kind that is void
            anna.wait()
            assert any("revoked this device's credential" in note for note in anna.fleet.notes)
            assert "is void: a device that joined with it was revoked" in refusal(code["url"])
            assert place.states() == {"anna": "revoked", "ben": "ready"}
        listed = {c["id"]: c for c in place.ask("pair", "--list")["codes"]}
        assert (listed[code["id"]]["state"], listed[code["id"]]["used"]) == ("void", 2)
        assert sorted(listed[code["id"]]["devices"]) == ["anna", "ben"]
        assert (listed[code["id"]]["own"], listed[spare["id"]]["own"]) == (True, False)
        place.ask("pair", "--void", str(spare["id"]))
        assert "is void: the server's operator voided it" in refusal(spare["url"])
    assert place.own() == {"anna": True, "ben": False}  # the server is gone
    place.ask("devices", "own", "ben")
    assert place.own() == {"anna": True, "ben": True}
    table = here("pair", "--list", "--data", str(place.data)).stdout
    assert "anna" in table
    assert code["code"] not in table
    assert here("pair", "--void", "99", "--data", str(place.data)).returncode == 2
    assert here("pair", "--list", "--void", "1", "--data", str(place.data)).returncode == 2


def test_who_has_no_valid_code_or_token_is_refused(place: Place) -> None:
    with place.server_here() as url:
        expired = place.ask("pair", "--minutes", "0.00001")
        bare = url.split("#")[0]
        for target, words in (
            (expired["url"], "expired"),
            (f"{bare}#c=0000-0000-0000", "does not know this join code"),
            (bare, "neither"),
        ):
            assert words in refusal(target)
        assert place.states() == {}
        wrong = here("devices", "--server", f"{bare}#c=guess")
        assert wrong.returncode == 1
        assert "operator's token is not valid" in wrong.stderr
        wrong = here("devices", "revoke", "x", "--server", url)  # a device's code is no token
        assert wrong.returncode == 2
        assert "is a join URL" in wrong.stderr
        nobody = here("devices", "revoke", "nobody", "--data", str(place.data))
        assert nobody.returncode == 2
        assert "nobody" in nobody.stderr


@pytest.mark.nightly
def test_a_revocation_holds_though_the_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        place = Place(disk.path)
        with place.server() as (server, _, url), place.device(url, "anna") as anna:
            anna.ready()
            disk.fill(0)
            shown = here("devices", "revoke", "anna", "--data", str(place.data))
            assert "anna is revoked" in shown.stderr, shown.stderr
            assert anna.process.wait(PATIENCE_S) == 1
            assert place.states() == {"anna": "revoked"}
            disk.free()
            store = "not asked yet"
            while store:  # what is to be written is tried again every two seconds
                status = here("status", "--data", str(place.data), "--json")
                store = json.loads(status.stdout)["server"]["store"]
            server.kill()
        assert place.states() == {"anna": "revoked"}


def test_a_device_is_back_by_itself_after_a_normal_stop_of_the_server(place: Place) -> None:
    with ExitStack() as stack:
        with place.server_here() as url:
            anna = stack.enter_context(place.device(url, "anna"))
            anna.ready()
        assert anna.event("waiting")["reason"] == "the server is closing"
        port = re.search(r":(\d+)/", url)
        assert port is not None
        with place.server_here(int(port[1])):
            anna.ready()
            assert place.states() == {"anna": "ready"}
            (again,) = place.ask("devices")["devices"]
            assert again["sessions"] == 2


def test_many_emulated_devices_with_one_code(place: Place) -> None:
    with place.server_here():
        code = place.ask("pair", "--uses", "3", "--minutes", "60")
        done = here(
            "emulate", "--devices", "3", "--server", code["page_url"], "--duration", "0.5", "--json"
        )
        assert done.returncode == 0, done.stderr
        assert records(done.stdout)[-1]["joined"] == 3
        assert len(place.states()) == 3
        shown = here("devices", "--data", str(place.data))
        assert len(shown.stdout.splitlines()) == 4
        assert "lost (the connection was closed)" in shown.stdout
        picture = place.data / "code.png"
        refused = here("pair", "--data", str(place.data), "--png", str(picture))
        assert (refused.returncode, picture.exists()) == (2, False)
        assert "cleave serve --host 0.0.0.0" in refused.stderr
        shown = here("pair", "--data", str(place.data))
        assert "cleave join 'http://" in shown.stdout
        app = here("pair", "--android", "--data", str(place.data))
        assert "cleave://join?url=http%3A%2F%2F" in app.stdout
        assert "adb install" in app.stderr
        assert "only this machine can reach 127.0.0.1" in app.stderr
        for said in (app, shown, here("dashboard", "--data", str(place.data))):
            assert "▀" not in said.stderr  # no phone could open what it says
        assert "no jobs yet" in here("jobs", "--data", str(place.data)).stderr


def test_the_operators_token_is_not_printed(place: Place) -> None:
    process = subprocess.Popen(
        [*CLEAVE, "serve", "--port", "0", "--data", str(place.data)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "cleave train" in line:
            break
    second = here("serve", "--port", "0", "--data", str(place.data))
    assert second.returncode == 1
    assert "another server uses" in second.stderr
    process.terminate()
    said += process.communicate()[1]
    token = (place.data / "operator.token").read_text().strip()
    assert len(token) >= 43
    assert token not in said
    assert "operator.url" in said
    for path in {*place.data.iterdir()} - {place.data / "lock"}:  # which holds a process id
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


class KnownDevice:
    """A device of this process that remembers its credential."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.credential = ""

    async def serve(self, url: str, computer: Computer, ready: Callable[[int], None]) -> str:
        """One session; why it ended."""
        target = parse_join_url(url)
        hello = device_hello(
            credential=self.credential or target.credential,
            name=self.name,
            memory_bytes=10**9,
            flops_per_s=1e10,
            downlink_bytes_per_s=1e9,
            uplink_bytes_per_s=1e9,
        )

        def keep(welcome: messages.Welcome) -> None:
            self.credential = welcome.credential or self.credential

        connection = await open_connection(target)
        return await DeviceSession(connection, computer, hello, ready, on_welcome=keep).run()


def multiply_often(fleet: Fleet) -> None:
    for _ in range(8):
        check(submit(fleet))


def test_a_quarantine_outlasts_the_server_and_can_be_lifted(tmp_path: Path) -> None:
    liar, honest = KnownDevice("liar"), KnownDevice("honest")

    async def lies(server: Server, server_app: App) -> str:
        code = server_app.access.pair(uses=2)
        url = server.join_url(code.text)
        loop = asyncio.get_running_loop()
        here, both = asyncio.Event(), asyncio.Event()
        lying = asyncio.create_task(liar.serve(url, Liar(stale), lambda _: here.set()))
        await here.wait()
        work = loop.run_in_executor(None, multiply_often, server.fleet)
        computer = ComputeThread(NumpyBackend())
        helping = asyncio.create_task(honest.serve(url, computer, lambda _: both.set()))
        await both.wait()
        await work
        with pytest.raises(RefusedError) as refusal:
            await lying
        assert refusal.value.code is ErrorCode.QUARANTINED
        helping.cancel()
        return str(refusal.value)

    with served(tmp_path, str(tmp_path)) as (server, server_app, _):
        said = asyncio.run(lies(server, server_app))
        devices = {d["name"]: d for d in run_desk(server_app)}
        assert devices["liar"]["state"] == "quarantined"
        assert devices["liar"]["wrong_results"] >= 1  # one is enough where all of it is wrong
        assert devices["liar"]["reason"] in said

    async def again(server: Server) -> None:
        with pytest.raises(RefusedError, match="in quarantine: quarantined after") as refusal:
            await liar.serve(server.address, ComputeThread(NumpyBackend()), never)
        assert refusal.value.for_good

    async def released(server: Server) -> None:
        here = asyncio.Event()
        computer = ComputeThread(NumpyBackend())
        serving = asyncio.create_task(liar.serve(server.address, computer, lambda _: here.set()))
        await here.wait()
        serving.cancel()
        await asyncio.wait([serving])  # it says goodbye, which the server would wait for

    with served(tmp_path, str(tmp_path)) as (server, server_app, _):
        asyncio.run(again(server))
        server_app.device_admin.answer("release", {"device": "liar"})
        asyncio.run(released(server))


def run_desk(server_app: App) -> list[dict[str, Any]]:
    """The devices as they are kept: of sessions, the loop alone may ask."""
    server_app.access.writer.flush()
    sessions, server_app.device_admin.sessions = server_app.device_admin.sessions, None
    devices: list[dict[str, Any]] = server_app.device_admin.answer("devices", {})["devices"]
    server_app.device_admin.sessions = sessions
    return devices
