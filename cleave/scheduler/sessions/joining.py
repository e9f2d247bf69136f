"""Handle joining devices: admission, recognition, welcome and probe. This module does no I/O."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

from cleave.arrays import DType
from cleave.errors import ProtocolError
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import DeviceRates, PsRates
from cleave.protocol import features, limits, messages
from cleave.protocol.allowance import Allowance
from cleave.protocol.messages import ByeCode, ErrorCode, Feature, Hello, Op
from cleave.scheduler import events
from cleave.scheduler.instructions import Decision, Dismiss, Joined, Note, Refuse, Send
from cleave.scheduler.sessions.admission import (
    Admission,
    AdmissionResult,
    Authenticator,
    Refusal,
    clean_name,
)
from cleave.scheduler.sessions.device_history import DeviceHistory
from cleave.scheduler.sessions.pace import Estimate, Pace
from cleave.scheduler.sessions.probe import HANDHELD, JOINING, STATED, THOROUGH, Probe
from cleave.scheduler.sessions.reputation import Reputation, Setbacks
from cleave.scheduler.sessions.session import DeviceState, Session
from profiles.device_profile import DeviceKind

_MOST_VERSIONS: Final = 8  # maximum number of protocol versions listed in one message

# time in seconds after which a device may retry to join a full server
FULL_RETRY_S: Final = 30.0
ASSUMED_FLOPS_PER_S: Final = 50e9  # a modest laptop's speed, assumed if a device specifies none


def unfit(hello: Hello, full_with: int | None) -> Refusal | None:
    """Return a refusal for an unsuitable version, too little memory or a full server, else None.

    Args:
        full_with: the maximum number of devices if the server is full; None otherwise.

    Raises:
        ProtocolError: if the `hello` lacks an operation or dtype that every device must support.
    """
    if hello.version != limits.VERSION:
        return Refusal(ErrorCode.VERSION, other_version(hello))
    if Op.MATMUL.value not in hello.ops or DType.FP32.value not in hello.dtypes:
        raise ProtocolError("a device must support op 'matmul' and dtype 'fp32'")
    if hello.memory_bytes < limits.MIN_DEVICE_MEMORY_BYTES:
        reason = (
            f"the device offers {hello.memory_bytes} bytes of memory; "
            f"it must offer {limits.MIN_DEVICE_MEMORY_BYTES} or more"
        )
        return Refusal(ErrorCode.LIMIT, reason)
    if full_with is not None:
        reason = f"this server is full, with {full_with} devices; try again later"
        return Refusal(ErrorCode.LIMIT, reason, FULL_RETRY_S)
    return None


def other_version(hello: Hello) -> str:
    """Return the error message for a client whose `hello` uses another protocol version."""
    if limits.VERSION in hello.versions:
        return (
            f"this {hello.role.value} sent hello in protocol version {hello.version}; "
            f"send it in version {limits.VERSION}, which this {hello.role.value} also supports"
        )
    spoken = ", ".join(str(v) for v in sorted({hello.version, *hello.versions[:_MOST_VERSIONS]}))
    return (
        f"this server speaks protocol version {limits.VERSION} and the {hello.role.value} speaks "
        f"{spoken}; install the same version of cleave on both"
    )


# Assumed throughput in layer graphs, as a share of the throughput in matrix multiplication, until a
# step by stages shows it. On one x86 core, both graphs of a layer of OPT-125M reached 0.68.
GRAPH_SHARE: Final = 0.65


def stated_rates(session: int, hello: Hello) -> DeviceRates:
    """Return the rates stated in a `hello`, clipped to the protocol's limits."""
    return bounded(
        DeviceRates(
            device=session,
            downlink_bytes_per_s=hello.downlink_bytes_per_s,
            uplink_bytes_per_s=hello.uplink_bytes_per_s,
            flops_per_s=hello.flops_per_s or ASSUMED_FLOPS_PER_S,
            graph_flops_per_s=hello.graph_flops_per_s or GRAPH_SHARE * hello.flops_per_s,
            graph_bf16_flops_per_s=hello.graph_bf16_flops_per_s,
            latency_s=hello.latency_s,
            memory_bytes=hello.memory_bytes,
            dtypes=hello.dtypes,
        )
    )


def bounded(rates: DeviceRates) -> DeviceRates:
    """Return rates clipped to the protocol's limits."""
    return replace(
        rates,
        downlink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.downlink_bytes_per_s),
        uplink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.uplink_bytes_per_s),
        flops_per_s=_within(limits.MIN_FLOPS_PER_S, rates.flops_per_s),
        graph_flops_per_s=_stated_flops_per_s(rates.graph_flops_per_s),
        graph_bf16_flops_per_s=_stated_flops_per_s(rates.graph_bf16_flops_per_s),
        latency_s=min(limits.MAX_LATENCY_S, rates.latency_s),
    )


def _stated_flops_per_s(value: float) -> float:
    """Return a throughput within the protocol's limits; 0 if none is stated."""
    return _within(limits.MIN_FLOPS_PER_S, value) if value > 0 else 0.0


def _within(least: float, value: float) -> float:
    return min(limits.MAX_PER_S, max(least, value))


class ShortStays:
    """Limits how often devices make short stays, because every fleet change causes replanning.

    A device may make `MAX_SHORT_STAYS` short stays in a row, and one more every `SHORT_STAY_REST_S`
    seconds.
    """

    def __init__(self) -> None:
        self._forgiven_s: dict[int, float] = {}  # key: device; value: expiry time

    def left(self, device: int, came_s: float, now_s: float) -> None:
        """Record that a device left. The stay counts if it was shorter than `SHORT_STAY_S`."""
        if now_s - came_s < limits.SHORT_STAY_S:
            before_s = max(now_s, self._forgiven_s.get(device, now_s))
            self._forgiven_s[device] = before_s + limits.SHORT_STAY_REST_S

    def wait_s(self, device: int, now_s: float) -> float:
        """Return the time until a device may rejoin, in seconds; 0 if it may rejoin now."""
        counted_s = self._forgiven_s.get(device, now_s) - now_s
        return max(0.0, counted_s - (limits.MAX_SHORT_STAYS - 1) * limits.SHORT_STAY_REST_S)

    def tick(self, now_s: float) -> None:
        """Remove short stays that have expired."""
        self._forgiven_s = {who: s for who, s in self._forgiven_s.items() if s > now_s}


@dataclass(eq=False)
class Joining:
    """Handles joining devices, from the `hello` message until a device is available for tasks.

    Methods that handle an event return the decisions to carry out.

    Args:
        rng: secret random generator for the numbers of the arithmetic tests.
        max_devices: maximum number of connected devices; None if unlimited.
        observe: whether plans use each device's measured pace.
        coding: policy that selects the links on which payloads are compressed.
        card: rates of the server's network card; None if the card is not a bottleneck.
        expected: minimum number of devices that are assumed to share the network card.
    """

    auth: Authenticator
    history: DeviceHistory
    rng: random.Random
    _: KW_ONLY
    max_devices: int | None
    observe: bool
    coding: CodingPolicy
    card: PsRates | None
    expected: int

    def __post_init__(self) -> None:
        self._sharing = self.expected
        self._resting: dict[int, float] = {}  # key: `known_as`; value: end of the wait
        self._short_stays = ShortStays()

    def rest(self, session: Session, now_s: float) -> None:
        """Bar a device that exceeded a message limit from rejoining for `limits.REST_S` seconds."""
        if session.known_as is not None:
            self._resting[session.known_as] = now_s + limits.REST_S

    def left(self, session: Session, now_s: float) -> None:
        """Record that a device's session ended. Short stays delay the device's next admission."""
        if session.known_as is not None and not session.measure:
            self._short_stays.left(session.known_as, session.opened_s, now_s)

    def tick(self, now_s: float) -> None:
        """Remove waiting times that have expired."""
        self._short_stays.tick(now_s)
        self._resting = {who: s for who, s in self._resting.items() if s > now_s}

    def admit(self, hello: Hello, address: str, sessions: int, now_s: float) -> AdmissionResult:
        """Admit a device or refuse it with a reason.

        Args:
            sessions: number of open sessions, including the device's own session.

        Raises:
            ProtocolError: if the `hello` lacks an operation or dtype that every device must have.
        """
        self._sharing = max(self.expected, sessions)
        full = self.max_devices is not None and sessions > self.max_devices
        refusal = unfit(hello, self.max_devices if full else None)
        # The authenticator is asked last because it may use up a join code.
        admission = refusal or self.auth.admit(hello, address)
        known_as = admission.known_as if isinstance(admission, Admission) else None
        if known_as is None:
            return admission
        if (rest_s := self._resting.get(known_as, now_s) - now_s) > 0:
            reason = f"this device exceeded a message limit; it may rejoin in {rest_s:.0f} s"
            return Refusal(ErrorCode.LIMIT, reason, rest_s)
        if not hello.measure and (rest_s := self._short_stays.wait_s(known_as, now_s)) > 0:
            reason = (
                f"this device left {limits.MAX_SHORT_STAYS} times shortly after joining; it may "
                f"rejoin in {rest_s:.0f} s"
            )
            return Refusal(ErrorCode.LIMIT, reason, rest_s)
        return admission

    def begin(
        self,
        session: Session,
        hello: Hello,
        admission: Admission,
        now_s: float,
        *,
        verify: bool,
        returns: bool = False,
    ) -> Sequence[Decision]:
        """Welcome an admitted device. Start a probe if the device must be measured or tested.

        Args:
            returns: whether the PS knows which arrays the device still has from its last session.
            verify: whether the server verifies results. If so, the probe tests the device's
                arithmetic, unless the device joins only for a link measurement.
        """
        self._introduce(session, hello, admission)
        session.admitted_s = now_s
        if Feature.KEEPS in session.features:
            session.returning = returns
            session.arrays = hello.holds if returns else f"{self.rng.getrandbits(128):032x}"
        assert session.rates is not None
        welcome = messages.Welcome(
            session.id,
            server=self.auth.server,
            credential=admission.credential,
            features=tuple(feature.value for feature in session.features),
            arrays=session.arrays,
        )
        session.allowance = Allowance(now_s)
        stated = bool(hello.downlink_bytes_per_s and hello.uplink_bytes_per_s)
        # Tests cost the owner of a phone data. Other devices are measured again when they rejoin
        # later, because their machine or network may have been busy.
        handheld = session.kind in (DeviceKind.PHONE, DeviceKind.TABLET)
        known = admission.measured if handheld else None
        if not stated and (before := self.history.rates_before(session, now_s, known)) is not None:
            session.rates, stated = before, True
        if stated and not session.measure and not verify:
            return [Send(session.id, welcome), *self._ready(session)]
        joining = HANDHELD if handheld else JOINING
        effort = THOROUGH if session.measure else STATED if stated else joining
        secret = self.rng if verify and not session.measure else None
        session.probe = Probe(session.rates, effort, secret, session.probe_ids)
        session.state = DeviceState.PROBING
        return [Send(session.id, m) for m in (welcome, *session.probe.begin(now_s))]

    def probed(
        self, session: Session, probe: Probe, message: messages.Result, now_s: float
    ) -> Sequence[Decision]:
        """Handle a probe result. After the last result, make the device ready or send the rates."""
        sent = [Send(session.id, m) for m in probe.result(message, now_s)]
        if probe.fault:
            reason = f"it failed its arithmetic test: {probe.fault}"
            return [Refuse(session.id, ErrorCode.QUARANTINED, reason)]
        if (found := probe.rates) is None:
            return sent
        if session.measure:
            bye = Dismiss(session.id, ByeCode.MEASURED)
            return [*sent, Send(session.id, found), bye]
        session.probe = None
        session.rates = bounded(probe.device)
        if probe.measures_link:
            self.history.measured(session)
        return [*sent, *self._ready(session)]

    def probe_run_failed(
        self, session: Session, probe: Probe, message: messages.TaskError, now_s: float
    ) -> Sequence[Decision]:
        """Repeat a failed run of the probe.

        Raises:
            ProtocolError: if too many consecutive runs fail, or the probe does not await this run.
        """
        again = probe.failed(message.id, now_s) if probe.awaits(message.id) else []
        if not again:
            raise ProtocolError(f"the device could not complete the probe: {message.reason}")
        return [Send(session.id, m) for m in again]

    def _introduce(self, session: Session, hello: Hello, admission: Admission) -> None:
        """Copy a device's identity, stated properties and stored behavior into the session."""
        session.measured_by = admission.measured_by
        session.name = admission.name or clean_name(hello.name)
        session.profile = clean_name(hello.profile)
        session.kind = DeviceKind.named(hello.kind)
        session.identity, session.known_as = admission.identity, admission.known_as
        session.own, session.here = admission.own, admission.here
        session.rounding = self.history.rounding_before(session)
        session.reputation = Reputation(wrong=admission.faults, penalty=admission.penalty)
        behavior = self.history.behavior_before(session, admission.behavior)
        session.setbacks = Setbacks.remembered(behavior.setbacks, behavior.failure)
        if self.observe:
            session.pace = Pace(Estimate(behavior.slowness, behavior.late_s))
        session.measure = hello.measure
        session.features = features.agreed(hello)
        if self.coding is CodingPolicy.OFF:
            session.features -= {Feature.CODING}
        session.rates = stated_rates(session.id, hello)
        session.claimed_flops_per_s = session.rates.flops_per_s
        session.claimed_graph_flops_per_s = max(
            session.rates.graph_flops_per_s, session.rates.graph_bf16_flops_per_s
        )

    def _ready(self, session: Session) -> Sequence[Decision]:
        session.state = DeviceState.READY
        session.reason = session.pace.estimate.text
        assert session.rates is not None
        if Feature.CODING in session.features:
            session.rates = self.coding.decided(session.rates, self.card, self._sharing)
        careful = session.setbacks.times > 0
        rates = bounded(session.planned_rates)
        ready: list[Decision] = [Joined(session.id), events.DeviceReady(rates, careful)]
        if rates.codes_uplink:
            session.may_code = True
            ready.insert(0, Send(session.id, messages.CodeResults()))
        return ready


def superseded(admission: Admission, sessions: Iterable[Session]) -> Sequence[Decision]:
    """Return decisions that end the earlier sessions replaced by a new admission.

    An earlier connection may have failed unnoticed. If the connection is still alive, the client
    receives the reason and does not reconnect.
    """
    if admission.measured_by:
        before = [s.id for s in sessions if s.measured_by == admission.measured_by]
        reason = (
            "another link measurement started with the same join code or credential, so this "
            "earlier one ends; run measurements one after another"
        )
        over = before[: max(0, len(before) + 1 - admission.at_once)]
        return [Refuse(id, ErrorCode.DUPLICATE, reason) for id in over]
    here = [s.id for s in sessions if s.identity == admission.identity]
    if admission.identity is None or not here:
        return []
    reason = (
        "the same device joined a second time, so this first session ends; "
        "to run two devices on one machine, join each with its own --name and join code"
    )
    text = f"{admission.name} joined again; its earlier session {here[0]} ends"
    return [Note(text), *(Refuse(id, ErrorCode.DUPLICATE, reason) for id in here)]
