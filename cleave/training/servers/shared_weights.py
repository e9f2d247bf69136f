"""Weights of which each of several servers keeps a part (ZeRO, stage 3: arXiv 1910.02054).

A weight is on the server that owns it. The others have a layer's weights while they compute that
layer, forward and again backward, and those outside the layers for a whole step. Gradients are
added up at their owners after each backward pass of a layer.

All servers exchange the same things in the same order, see `exchanges`. They agree how many passes
a step has: one that has fewer micro-batches takes part in the first ones without computing, and so
does one that gave up its part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cleave.errors import CleaveError, UsageError
from cleave.graphs.calls import decoder_layers
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import LostServerError, Ranks, owners_of
from cleave.training.tiles.offloaded_linear import Operands

OUTSIDE: Final = 0
"""The number of the unit with all weights outside the layers; layers follow in their order."""


class Kind(Enum):
    """What happens at one point of a step."""

    FORWARD = auto()
    """A unit's weights are gathered for its forward pass."""

    BACKWARD = auto()
    """They are gathered for its backward pass."""

    DONE = auto()
    """They are not needed any more; after a backward pass its gradients are added up."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One point of a step that all servers come to in the same order.

    Attributes:
        number: of the pass, from 0.
        kind: what happens.
        unit: with which weights.
    """

    number: int
    kind: Kind
    unit: int


def exchanges(passes: int, layers: int, *, backward: bool) -> list[Exchange]:
    """Return what is exchanged in a step, in order.

    Args:
        passes: how many there are, forward and, maybe, backward.
        layers: of the model, whose numbers begin at 1.
        backward: whether there are backward passes.
    """
    found = [Exchange(0, Kind.FORWARD, OUTSIDE)]
    for number in range(passes):
        for layer in range(1, layers + 1):
            found.append(Exchange(number, Kind.FORWARD, layer))
            if not backward:
                found.append(Exchange(number, Kind.DONE, layer))
        for layer in range(layers, 0, -1) if backward else ():
            if layer < layers:  # the last one still has them
                found.append(Exchange(number, Kind.BACKWARD, layer))
            found.append(Exchange(number, Kind.DONE, layer))
        if backward or number == passes - 1:
            found.append(Exchange(number, Kind.DONE, OUTSIDE))
    return found


@dataclass(frozen=True, slots=True)
class _Unit:
    """Weights that are gathered together.

    Attributes:
        weights: all of them, by name.
        others: those that another server owns.
        owners: the rank that owns each weight.
    """

    weights: dict[str, nn.Parameter]
    others: list[nn.Parameter]
    owners: list[int]

    @property
    def trained(self) -> list[str]:
        """Return the names of those that are trained."""
        return [name for name, weight in self.weights.items() if weight.requires_grad]


class SharedWeights:
    """Gathers the weights of a model's layers for their passes, and frees them.

    Args:
        model: a causal language model of transformers, the same on all servers; its layers are
            computed again in the backward pass, so that nothing but them keeps their weights.
        ranks: the servers.
        clock: in seconds.

    Attributes:
        owners: the rank that owns each weight, by name.
        waited_s: how long this step has waited for gathered weights, and for sums of gradients.

    Raises:
        UsageError: when the model has no list of layers.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.owners = weight_owners(model, ranks.count)
        self._ranks, self._clock = ranks, clock
        self._model = model
        modules = _parts(model)
        self._units = [
            self._unit(names) for names in _names(model, [list(m.parameters()) for m in modules])
        ]
        self._modules = modules
        self._operands: list[Operands] = []
        self._whole: set[int] = set()
        self._schedule: list[Exchange] = []
        self._next = 0
        self._passes = 0
        self._pass: int | None = None  # that this server computes now
        self._in_backward = False
        self._new_sums: Callable[[], GradientSums] | None = None
        self._sums: GradientSums | None = None
        self._found: dict[str, None] = {}
        self._waited_s = 0.0
        self._nothing = {
            dtype: torch.full((), torch.nan, dtype=dtype)
            for dtype in {weight.dtype for weight in model.parameters()}
        }

    def _unit(self, names: Sequence[str]) -> _Unit:
        weights = {name: self._model.get_parameter(name) for name in names}
        owners = [self.owners[name] for name in names]
        pairs = zip(weights.values(), owners, strict=True)
        return _Unit(weights, [w for w, owner in pairs if owner != self._ranks.rank], owners)

    @property
    def order(self) -> list[str]:
        """Return the names of all weights that are trained; gradients come from the last ones."""
        return [name for unit in self._units for name in unit.trained]

    @property
    def waited_s(self) -> float:
        """Return how long this step has waited for other servers."""
        return self._waited_s + (self._sums.waited_s if self._sums is not None else 0.0)

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of some tensors, by a weight's name, that this server owns."""
        return {n: t for n, t in tensors.items() if self.owners[n] == self._ranks.rank}

    def begin_sharing(self) -> None:
        """Free the weights that others own, and gather them from now on when they are needed."""
        marked = (m.__dict__.get("_cleave") for m in self._model.modules())
        self._operands = list({id(o): o for o in marked if o is not None}.values())
        for number, module in enumerate(self._modules, start=1):
            module.register_forward_pre_hook(partial(self._before_forward, number))
            module.register_forward_hook(partial(self._after_forward, number))
        for unit in self._units:
            self._free(unit)

    # --- a step ---

    def begin(self, passes: int, new_sums: Callable[[], GradientSums] | None) -> None:
        """Begin a step, or an evaluation.

        Args:
            passes: the most that any server computes of it.
            new_sums: makes what adds up the gradients of a pass; None where there are none.
        """
        self._schedule = exchanges(passes, len(self._modules), backward=new_sums is not None)
        self._passes, self._next = passes, 0
        self._new_sums, self._found = new_sums, {}
        self._waited_s = 0.0

    @contextmanager
    def computing(self, left: int) -> Iterator[None]:
        """Gather weights for one pass that is computed here, with its backward pass if it has one.

        Args:
            left: passes that this server computes after it.
        """
        self._pass, self._in_backward = self._passes - 1 - left, False
        try:
            if not self._next:  # what is outside the layers comes first, and stays
                self._do_next()
            yield
            while self._next < len(self._schedule) and self._number <= self._pass:
                self._do_next()
        except BaseException:
            self._free_all()
            raise
        finally:
            self._pass = None

    @property
    def _number(self) -> int:
        return self._schedule[self._next].number

    def finish(self) -> list[str]:
        """Take part in all that is left; return which weights have a gradient on any server.

        Every server calls this after its last pass, also where it gave that up.

        Raises:
            LostServerError: when another server is gone.
        """
        while self._next < len(self._schedule):
            self._do_next()
        self._free_all()
        return [name for name in self.order if name in self._found]

    @contextmanager
    def evaluating(self, passes: int) -> Iterator[None]:
        """Begin and finish an evaluation, in a context.

        Args:
            passes: the most that any server computes of it.
        """
        self.begin(passes, None)
        try:
            yield
        except LostServerError:
            raise
        except CleaveError:
            self.finish()  # others wait for it
            raise
        self.finish()

    def updated(self) -> None:
        """Note that weights have new values, on the servers that own them."""
        for operands in self._operands:
            operands.updated()

    # --- exchanges ---

    def _come_to(self, here: Exchange) -> None:
        """Do what comes before an exchange without keeping anything, and it itself.

        Raises:
            UsageError: when it is not to come any more.
        """
        while self._next < len(self._schedule):
            if self._do_next(here) == here:
                return
        raise UsageError(
            f"--memory is 'sharded', and {type(self._model).__name__} does not call its layers "
            "one after another, each once; give --memory recompute"
        )

    def _do_next(self, kept: Exchange | None = None) -> Exchange:
        """Do the next exchange; what is gathered stays only where it is the one to be kept."""
        exchange = self._schedule[self._next]
        self._next += 1
        unit = self._units[exchange.unit]
        if exchange.kind is Kind.DONE:
            if exchange.unit != OUTSIDE or exchange.number == self._passes - 1:
                self._release(exchange.unit)
            if self._new_sums is not None:
                self._add_up(unit.trained, last=exchange.unit == OUTSIDE)
            return exchange
        if exchange.unit not in self._whole:
            self._gather(exchange.unit)
        if exchange != kept and exchange.unit != OUTSIDE:
            self._release(exchange.unit)
        return exchange

    def _gather(self, number: int) -> None:
        unit, began_s = self._units[number], self._clock()
        for weight in unit.others:
            weight.data = torch.empty(weight.shape, dtype=weight.dtype)
        self._ranks.spread([weight.data for weight in unit.weights.values()], unit.owners)
        self._waited_s += self._clock() - began_s
        self._whole.add(number)
        for weight, operands in self._pairs(unit):
            operands.bind(weight)

    def _release(self, number: int, *, done: bool = True) -> None:
        if number not in self._whole:
            return
        self._whole.discard(number)
        for weight, operands in self._pairs(self._units[number]):
            operands.unbind(weight, done=done)
        self._free(self._units[number])

    def _pairs(self, unit: _Unit) -> Iterator[tuple[nn.Parameter, Operands]]:
        return ((weight, operands) for weight in unit.others for operands in self._operands)

    def _free(self, unit: _Unit) -> None:
        """Free the weights of a unit that others own.

        Their shapes stay, and every element is NaN, which nobody takes for a weight.
        """
        for weight in unit.others:
            weight.data = self._nothing[weight.dtype].expand(weight.shape)

    def _free_all(self) -> None:
        """Free all that others own, after a step or where it was given up."""
        for number in list(self._whole):
            self._release(number, done=False)

    def _add_up(self, names: Sequence[str], *, last: bool) -> None:
        assert self._new_sums is not None
        if self._sums is None:
            self._sums = self._new_sums()
        for name in names:
            self._sums.complete(name)
        if last:
            self._found |= dict.fromkeys(self._sums.finish())
            self._waited_s += self._sums.waited_s
            self._sums = None

    # --- hooks of the layers ---

    def _before_forward(self, unit: int, module: nn.Module, arguments: Any) -> None:
        if self._pass is None:
            raise RuntimeError("the weights of this layer are on other servers now")
        if not self._in_backward:  # else it is computed again, and has them
            self._come_to(Exchange(self._pass, Kind.FORWARD, unit))

    def _after_forward(self, unit: int, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._in_backward or self._pass is None:
            return
        if self._new_sums is None:
            self._come_to(Exchange(self._pass, Kind.DONE, unit))
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                hook = partial(self._before_backward, unit)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if unit < len(self._modules):
            self._release(unit)

    def _before_backward(self, unit: int, gradient: Tensor) -> None:
        assert self._pass is not None
        self._in_backward = True
        if unit not in self._whole:
            self._come_to(Exchange(self._pass, Kind.BACKWARD, unit))


def weight_owners(model: nn.Module, count: int) -> dict[str, int]:
    """Return which rank owns each weight: what is trained and what is frozen, each shared alike."""
    found: dict[str, int] = {}
    for trained in (True, False):
        sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad is trained}
        found |= dict(zip(sizes, owners_of(list(sizes.values()), count), strict=True))
    return found


def _parts(model: Any) -> list[nn.Module]:
    """Return the modules whose weights come and go: the layers, and a head of its own weights."""
    layers = list(decoder_layers(model))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return layers
    within = set(chain.from_iterable(module.modules() for module in [*layers, head]))
    own = {id(parameter) for parameter in head.parameters()}
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if module not in within
        for parameter in module.parameters(recurse=False)
    }
    return layers if own & elsewhere else [*layers, head]


def _names(model: nn.Module, parts: Sequence[Sequence[nn.Parameter]]) -> list[list[str]]:
    """Return the names of the weights outside all parts, and then those of each part.

    What two parts have both is outside.
    """
    found: list[list[str]] = [[] for _ in range(len(parts) + 1)]
    having: dict[int, set[int]] = {}
    for number, parameters in enumerate(parts, start=1):
        for parameter in parameters:
            having.setdefault(id(parameter), set()).add(number)
    for name, parameter in model.named_parameters():
        numbers = having.get(id(parameter), set())
        found[numbers.pop() if len(numbers) == 1 else OUTSIDE].append(name)
    return found
