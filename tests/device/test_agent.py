"""A guest comes, drains and comes again, in fake time; and loses nothing, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cleave.device import agent as g
from cleave.device.agent import Agent, AgentSession, Notice, ServerSelection, State
from cleave.device.policy import ALLOWED, Cause, Permission
from cleave.device.session import (
    DeviceStatus,
    RefusedError,
    UnansweredError,
)
from cleave.errors import CleaveError, ProtocolError
from cleave.protocol import messages
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import Error, ErrorCode
from cleave.transport.join_url import JoinUrl

BACK = Permission(Cause.OWNER, "the owner is back")
HOT = Permission(Cause.HEAT, "82 C is above --max-temp 80")
HOTTER = Permission(Cause.HEAT, "83 C is above --max-temp 80")


class FakeSession:
    """Welcomed at once; ends when it is drained, or as it is told to."""

    def __init__(
        self,
        ready: Callable[[int], None],
        *,
        drains: bool = True,
        ends: str | Exception = "",
        back_s: float | None = 0.0,
    ) -> None:
        self.comes_back_s = back_s
        self.moves_to = ""
        self._ready = ready
        self._drains = drains
        self._ends = ends
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    @property
    def status(self) -> DeviceStatus:
        return DeviceStatus(7, DeviceCounters(1, 2, 3, 4))

    async def run(self) -> str:
        if isinstance(self._ends, Exception):
            raise self._ends
        self._ready(7)
        if self._ends:
            return self._ends
        try:
            return await self._over
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def drain(self) -> None:
        if self._drains:
            self._over.set_result("drained")


class Scene:
    """A guest in fake time, its machine's verdicts one after the other, and what it said.

    When there are no verdicts left the guest is stopped. A guest without a policy has none.

    Args:
        sessions: for each connection, how the session behaves, or why there is none.
        known: whether the server is known to the guest; None: once it welcomed it.
        options: of the guest.
    """

    def __init__(
        self,
        verdicts: list[Permission] | None,
        sessions: list[dict[str, Any] | Exception],
        *,
        known: bool | None = None,
        **options: Any,
    ) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []
        self.said: list[Notice] = []
        self.opened: list[FakeSession] = []
        self._verdicts: Iterator[Permission] = iter(verdicts or ())
        self._sessions = iter(sessions)
        self.guest = Agent(
            self._connect,
            self.said.append,
            look=None if verdicts is None else self._look,
            known=None if known is None else lambda: known,
            clock=lambda: self.now_s,
            sleep=self._sleep,
            jitter=lambda: 1.0 if verdicts else 0.25,
            **options,
        )

    def run(self) -> list[tuple[State, str]]:
        asyncio.run(asyncio.wait_for(self.guest.run(), 30))
        return [(notice.state, notice.reason) for notice in self.said]

    async def _look(self) -> Permission:
        verdict = next(self._verdicts, None)
        if verdict is None:
            self.guest.stop()
            await asyncio.sleep(0)  # it ends here, unless it drains
        return verdict or ALLOWED

    async def _sleep(self, wait_s: float) -> None:
        self.sleeps.append(wait_s)
        self.now_s += wait_s
        for _ in range(5):  # let others run
            await asyncio.sleep(0)

    async def _connect(self, ready: Callable[[int], None]) -> AgentSession:
        how = next(self._sessions)
        if isinstance(how, Exception):
            raise how
        how = dict(how)
        self.now_s += how.pop("lasts_s", 0.0)
        self.opened.append(FakeSession(ready, **how))
        return self.opened[-1]


def test_it_waits_joins_drains_and_joins_again() -> None:
    scene = Scene([HOT, HOTTER, ALLOWED, ALLOWED, BACK, BACK, ALLOWED, ALLOWED], [{}, {}])
    assert scene.run() == [
        (State.WAITING, HOT.reason),  # and not again with another temperature
        (State.READY, ""),
        (State.DRAINING, BACK.reason),
        (State.LEFT, BACK.reason),
        (State.WAITING, BACK.reason),
        (State.READY, ""),
        (State.DRAINING, "asked to stop"),
        (State.LEFT, "drained"),
    ]
    assert set(scene.sleeps) == {g.LOOK_S, g.DRAIN_S}
    assert scene.said[-1].status.done.blocks == 1


def test_a_server_that_is_not_there_is_tried_ever_less_often() -> None:
    gone = CleaveError("no server answers")
    scene = Scene([ALLOWED] * 12, [gone] * 12)
    assert scene.run() == [(State.WAITING, "no server answers"), (State.LEFT, "interrupted")]
    assert scene.said[0].retry_s == 1
    assert scene.sleeps == [1, 2, 4, 8, 16, *[30] * 7]


def test_a_refusal_at_first_is_an_error_and_later_it_is_tried_again() -> None:
    refused = {"ends": CleaveError("the server refused this device: wrong credential")}
    with pytest.raises(CleaveError, match="wrong credential"):
        Scene([ALLOWED] * 3, [refused]).run()
    scene = Scene([ALLOWED] * 3, [{"ends": "bye"}, refused, {}])
    states = [state for state, _ in scene.run()]
    assert states[:4] == [State.READY, State.LEFT, State.WAITING, State.LEFT]
    assert states[-1] is State.LEFT


@pytest.mark.parametrize(
    "code", [ErrorCode.CREDENTIAL, ErrorCode.DUPLICATE, ErrorCode.QUARANTINED, ErrorCode.VERSION]
)
def test_a_refusal_that_lasts_is_an_error_whenever_it_comes(code: ErrorCode) -> None:
    refused = {"ends": RefusedError(messages.Error(code, "revoked"))}
    scene = Scene([ALLOWED] * 9, [{"ends": "bye"}, refused, {}])
    with pytest.raises(RefusedError, match="revoked"):
        scene.run()
    assert len(scene.opened) == 2


def test_the_owner_does_not_wait_long_for_a_drain() -> None:
    scene = Scene([ALLOWED, BACK, HOT], [{"drains": False}])
    said = scene.run()
    assert said[1:4] == [
        (State.DRAINING, BACK.reason),
        (State.LEFT, BACK.reason),
        (State.WAITING, HOT.reason),
    ]
    assert scene.opened[0].cancelled
    assert g.DRAIN_S <= scene.now_s <= g.DRAIN_S + 4 * g.LOOK_S


def test_a_look_may_say_when_to_look_again_and_nobody_waits_for_a_drain_of_no_time() -> None:
    away = Permission(Cause.OWNER, "away", 40.0)
    looks = [replace(away, until_s=7.0), Permission(None, "", 19.0), away, away]
    scene = Scene(looks, [{}], drain_s=0.0)
    assert scene.run() == [
        (State.WAITING, "away"),
        (State.READY, ""),
        (State.LEFT, "away"),  # and it did not drain
        (State.WAITING, "away"),
        (State.LEFT, "interrupted"),
    ]
    assert scene.sleeps == [7, 12, 21]
    assert scene.opened[0].cancelled


@pytest.mark.parametrize("known", [True, False])
def test_a_server_that_is_known_to_welcome_others_is_tried_again(known: bool) -> None:
    closed = CleaveError("the server closed the connection")
    sessions: list[dict[str, Any] | Exception] = [
        GONE,
        {"ends": closed},
        {"ends": "it broke"},
        BYE,
    ]
    scene = Scene([ALLOWED] * 9, sessions, stays=False, known=known)
    if not known:
        with pytest.raises(CleaveError, match="no server answers"):
            scene.run()
        return
    assert [state for state, _ in scene.run()] == [
        State.WAITING, State.LEFT, State.WAITING, State.READY, State.LEFT, State.WAITING,
        State.READY, State.LEFT,
    ]  # fmt: skip
    assert [s for s in scene.sleeps if s != g.LOOK_S] == [1, 2, 4]


async def _look_allowed() -> Permission:
    return ALLOWED


def _stopped(
    connect: Callable[[Callable[[int], None]], Awaitable[AgentSession]],
    begun: Callable[[list[Notice]], bool],
    policy: bool,
    *,
    twice: bool = False,
) -> list[Notice]:
    """Stop a guest once it has begun; return what it said."""
    said: list[Notice] = []

    async def scenario() -> None:
        guest = Agent(connect, said.append, look=_look_allowed if policy else None)
        running = asyncio.ensure_future(guest.run())
        while not begun(said):
            await asyncio.sleep(0)
        guest.stop()
        if twice:
            await asyncio.sleep(0.01)
            assert not running.done()
            guest.stop()
        await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    return said


@pytest.mark.parametrize("policy", [True, False])
def test_asked_twice_it_leaves_at_once(policy: bool) -> None:
    opened: list[FakeSession] = []

    async def connect(ready: Callable[[int], None]) -> AgentSession:
        opened.append(FakeSession(ready, drains=False))
        return opened[-1]

    assert [(n.state, n.reason) for n in _stopped(connect, bool, policy, twice=True)] == [
        (State.READY, ""),
        (State.DRAINING, "asked to stop"),
        (State.LEFT, "interrupted"),
    ]
    assert opened[0].cancelled


@pytest.mark.parametrize("policy", [True, False])
def test_asked_to_stop_it_does_not_come_back_after_an_error(policy: bool) -> None:
    class Fails(FakeSession):
        def drain(self) -> None:
            self._over.set_exception(refused(ErrorCode.LIMIT))

    async def connect(ready: Callable[[int], None]) -> AgentSession:
        return Fails(ready)

    said = _stopped(connect, bool, policy)
    assert [n.state for n in said] == [State.READY, State.DRAINING, State.LEFT]


@pytest.mark.parametrize("policy", [True, False])
def test_it_can_be_stopped_while_it_connects(policy: bool) -> None:
    connecting: list[None] = []

    async def connect(ready: Callable[[int], None]) -> AgentSession:
        connecting.append(None)
        await asyncio.Event().wait()
        raise AssertionError

    said = _stopped(connect, lambda _: bool(connecting), policy)
    assert said == [Notice(State.LEFT, "interrupted")]


BYE: dict[str, Any] = {"ends": "measured", "back_s": None}
CLOSING: dict[str, Any] = {"ends": "the server is closing", "back_s": 3.0}
GONE = CleaveError("no server answers")


def refused(code: ErrorCode) -> RefusedError:
    return RefusedError(Error(code, code.value))


def test_without_a_policy_a_goodbye_ends_it_and_first_errors_are_errors() -> None:
    plain = Scene(None, [BYE])
    assert plain.run() == [(State.READY, ""), (State.LEFT, "measured")]
    for first in (GONE, {"ends": CleaveError("the server closed the connection")}):
        plain = Scene(None, [first])
        with pytest.raises(CleaveError, match="server"):
            plain.run()
        assert plain.said == []


def test_a_lost_connection_is_made_again_without_a_policy() -> None:
    plain = Scene(None, [{"ends": "it broke"}, GONE, GONE, {"ends": "it broke"}, BYE])
    assert plain.run() == [
        (State.READY, ""),
        (State.LEFT, "it broke"),
        (State.WAITING, "it broke"),
        (State.WAITING, "no server answers"),
        (State.WAITING, "no server answers"),
        (State.READY, ""),
        (State.LEFT, "it broke"),
        (State.WAITING, "it broke"),
        (State.READY, ""),
        (State.LEFT, "measured"),
    ]
    # Full jitter: a random share, here always a quarter, of 1, 2, 4, 8 s.
    assert plain.sleeps == [0.25, 0.5, 1, 2]
    assert [n.retry_s for n in plain.said if n.state is State.WAITING] == plain.sleeps


def test_waits_are_capped_and_short_again_after_a_long_session() -> None:
    lost = {"ends": "it broke"}
    long = {"ends": "it broke", "lasts_s": g.STEADY_S}
    plain = Scene(None, [lost, *[GONE] * 11, long, BYE])
    plain.run()
    assert plain.sleeps[-3:] == [g.LONGEST_WAIT_S / 4, g.LONGEST_WAIT_S / 4, 0.25]


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize(
    "ends",
    [
        RefusedError(Error(ErrorCode.LIMIT, "full", 30.0)),
        RefusedError(Error(ErrorCode.PROTOCOL, "garbled")),
        UnansweredError("the server closed the connection"),
        ProtocolError("it sent a put before the welcome"),
    ],
    ids=str,
)
def test_before_the_first_welcome_it_comes_back_as_after_it(
    policy: bool, ends: CleaveError
) -> None:
    """The table of the protocol holds for both."""
    least_s = getattr(ends, "comes_back_s", 0.0)
    if policy:
        scene = Scene([ALLOWED] * 5, [{"ends": ends}, {}])
        states = [state for state, _ in scene.run()]
        assert [s for s in scene.sleeps if s != g.LOOK_S] == [least_s + 1]
    else:
        plain = Scene(None, [{"ends": ends}, BYE])
        states = [state for state, _ in plain.run()]
        assert plain.sleeps == [least_s + 0.25]
    assert states[:3] == [State.LEFT, State.WAITING, State.READY]


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("policy", [True, False])
def test_before_the_first_welcome_a_refusal_for_good_ends_it(policy: bool, session: bool) -> None:
    duplicate = refused(ErrorCode.DUPLICATE)
    first: list[dict[str, Any] | Exception] = [{"ends": duplicate}] if session else [duplicate]
    with pytest.raises(RefusedError):
        Scene([ALLOWED] * 5, first).run() if policy else Scene(None, first).run()


@pytest.mark.parametrize("policy", [True, False])
def test_after_a_server_that_closed_it_comes_back_and_no_sooner_than_told(policy: bool) -> None:
    if policy:
        scene = Scene([ALLOWED] * 5, [CLOSING, GONE, {}])
        states = [state for state, _ in scene.run()]
        sleeps = [s for s in scene.sleeps if s != g.LOOK_S]
        assert sleeps == [3 + 1, 2]
    else:
        plain = Scene(None, [CLOSING, GONE, BYE])
        states = [state for state, _ in plain.run()]
        assert plain.sleeps == [3 + 0.25, 0.5]
    assert states[:3] == [State.READY, State.LEFT, State.WAITING]
    assert State.READY in states[3:]


def test_a_refusal_that_says_when_is_tried_again_then() -> None:
    full = RefusedError(Error(ErrorCode.LIMIT, "full", 30.0))
    plain = Scene(None, [{"ends": "it broke"}, {"ends": full}, BYE])
    plain.run()
    assert plain.sleeps == [0.25, 30 + 0.5]


def test_once_is_once() -> None:
    plain = Scene(None, [{"ends": "it broke"}], once=True)
    assert plain.run() == [(State.READY, ""), (State.LEFT, "it broke")]


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
