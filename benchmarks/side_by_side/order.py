"""The rows to measure and their order: rows that decide a claim come first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.side_by_side.method import Method
from benchmarks.side_by_side.row import Key
from benchmarks.side_by_side.setting import Fault, Link, Setting, usual_seq
from benchmarks.side_by_side.shapes import SMOLLM2

OPT: Final = "opt-125m"
RANK: Final = 16

_HOME: Final = Link(100, 20)
_SLOW: Final = Link(50, 10)
_LAN: Final = Link(1000, 1000)
_MANY: Final = 8192
_FEW: Final = 1024

_PART: Final = 0.45
"""Share of a core for each device; the rest of the two cores carries the links' bytes."""

_PEERS: Final = "ddp:fp32:halved,fsdp:fp32,pipeline:fp32,hivemind:fp32:fp16"
_RESIDENT: Final = "resident:fp32,resident:fp32:apart"
_ALL: Final = (
    "plain:fp32,plain:bf16,stages:fp32,stages:bf16,stages:fp32:off,tiles:fp32,"
    "ddp:fp32,ddp:fp32:halved,pipeline:fp32,fsdp:fp32,hivemind:fp32,hivemind:fp32:fp16"
)


@dataclass(frozen=True)
class Group:
    """Rows that differ only in their method.

    Attributes:
        methods: methods as on the command line.
        link, tokens, rank, model, fault, cores: the setting.
        also: additional faults.
    """

    methods: str
    link: Link
    tokens: int
    rank: int = 0
    model: str = OPT
    fault: Fault = Fault.NONE
    cores: float = 0.0
    also: Sequence[Fault] = field(default=())

    def __iter__(self) -> Iterator[Key]:
        """Yield the rows of the group."""
        setting = Setting(
            self.model,
            self.tokens,
            usual_seq(self.tokens, 4),
            self.link,
            self.rank,
            cores=self.cores,
        )
        for text in self.methods.split(","):
            for fault in (self.fault, *self.also):
                yield Key(Method.of(text), replace(setting, fault=fault))


_ORDER: Final = (
    # Stages at most a third of DDP's and hivemind's time.
    Group("plain:fp32,stages:fp32,stages:bf16,ddp:fp32,hivemind:fp32", _HOME, _MANY),
    # LoRA at most 1.5 times the step's arithmetic.
    Group("plain:fp32,plain:bf16,stages:fp32,stages:bf16,ddp:fp32,ddp:bf16", _SLOW, _MANY, RANK),
    Group("plain:bf16,ddp:fp32:halved,hivemind:fp32:fp16,pipeline:fp32", _HOME, _MANY),
    # Stop and kill, behind fast links, because survival does not depend on the link.
    Group("plain:fp32", _LAN, _FEW),
    Group(
        "stages:fp32,ddp:fp32,hivemind:fp32,pipeline:fp32,fsdp:fp32,tiles:fp32",
        _LAN, _FEW, fault=Fault.STOP, also=(Fault.KILL,),
    ),
    # For comparison with the simulator, with fixed cores like separate machines.
    Group(
        "ddp:fp32,pipeline:fp32:1f1b,pipeline:fp32:gpipe,pipeline:fp32,stages:fp32",
        _HOME, _MANY, cores=_PART,
    ),
    Group(_ALL, _HOME, _MANY),
    Group("pipeline:fp32,hivemind:fp32,fsdp:fp32", _SLOW, _MANY, RANK),
    Group(f"plain:fp32,stages:fp32,ddp:fp32,{_PEERS}", _LAN, _MANY),
    # DDP without rounding sends twice the bytes of `halved`, which rows behind 100/20 already show.
    Group(f"plain:fp32,stages:fp32,{_PEERS}", _SLOW, _MANY),
    # Another model, with the methods that were fastest on the first.
    Group(
        "plain:fp32,stages:fp32,ddp:fp32:halved,pipeline:fp32,hivemind:fp32:fp16",
        _HOME, _MANY, model=SMOLLM2,
    ),
    Group("plain:fp32,stages:fp32,ddp:fp32", _SLOW, _MANY, RANK, SMOLLM2),
    Group("stages:fp32,tiles:fp32,ddp:fp32,pipeline:fp32,hivemind:fp32:fp16", _HOME, _FEW),
    # A pipeline's traffic, and no loss with a lost device.
    Group(f"pipeline:fp32,{_RESIDENT}", _HOME, _FEW),
    Group(_RESIDENT, _HOME, _MANY),
    Group(_RESIDENT, _SLOW, _MANY),
    Group(_RESIDENT, _HOME, _MANY, model=SMOLLM2),
)  # fmt: skip


def default_order() -> list[Key]:
    """Return all rows of the report; plain PyTorch, which has no link, once for all links."""
    found: dict[Key, Key] = {}
    for key in (key for group in _ORDER for key in group):
        linked = key.method.way.needs_links
        same = key if linked else Key(key.method, replace(key.setting, link=_HOME))
        found.setdefault(same, key)
    return [*found.values()]
