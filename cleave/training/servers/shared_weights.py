"""Shard weights across several servers (ZeRO, stage 3: arXiv 1910.02054).

Each weight is stored only on the server that owns it. All servers gather a layer's weights before
its forward pass, and again before its backward pass. Weights outside the layers are gathered once
per step. After a layer's backward pass, each gradient is summed on the weight's owner.

All servers perform the same exchanges in the same order. A server with fewer micro-batches takes
part in the exchanges of the first passes without computing. A server that abandons its part of a
step still performs the remaining exchanges.
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

OUTSIDE: Final = 0  # index of the unit of all weights outside the layers; the first layer is 1


class Kind(Enum):
    """The type of a weight exchange between servers.

    FORWARD and BACKWARD gather weights for a forward or backward pass. DONE frees the weights and,
    in a training step, sums their gradients.
    """

    FORWARD = auto()
    BACKWARD = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange in a step, for one layer's weights or for all weights outside the layers.

    Attributes:
        number: index of the pass in the step, from 0.
        unit: `OUTSIDE`, or the index of a layer, from 1.
    """

    number: int
    kind: Kind
    unit: int


def exchanges(passes: int, layers: int, *, backward: bool) -> list[Exchange]:
    """Return all exchanges of a step, in order.

    Args:
        backward: True if each pass is a forward and a backward pass, False for forward passes only.
    """
    found = [Exchange(0, Kind.FORWARD, OUTSIDE)]
    for number in range(passes):
        for layer in range(1, layers + 1):
            found.append(Exchange(number, Kind.FORWARD, layer))
            if not backward:
                found.append(Exchange(number, Kind.DONE, layer))
        for layer in range(layers, 0, -1) if backward else ():
            if layer < layers:  # the last layer's weights are still gathered
                found.append(Exchange(number, Kind.BACKWARD, layer))
            found.append(Exchange(number, Kind.DONE, layer))
        if backward or number == passes - 1:
            found.append(Exchange(number, Kind.DONE, OUTSIDE))
    return found


@dataclass(frozen=True, slots=True)
class _Unit:
    """Weights that are gathered together: one layer's weights, or all weights outside the layers.

    Attributes:
        others: the weights of the unit that other servers own.
        owners: rank that owns each of `weights`, in the same order.
    """

    weights: dict[str, nn.Parameter]
    others: list[nn.Parameter]
    owners: list[int]

    @property
    def trained(self) -> list[str]:
        return [name for name, weight in self.weights.items() if weight.requires_grad]


class SharedWeights:
    """A model's weights, which are gathered before each layer's passes and freed afterwards.

    Args:
        model: transformers causal language model, the same on all servers. It must use
            activation checkpointing, so that autograd does not retain weights between passes.
        clock: returns the current time in seconds.

    Attributes:
        owners: the rank that owns each weight, by name.

    Raises:
        LayerGraphError: if the model has no list of layers.
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
        self._pass: int | None = None  # index of the pass that this server computes now
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
        """Return the names of all trained weights. Gradients become complete in reverse order."""
        return [name for unit in self._units for name in unit.trained]

    @property
    def waited_s(self) -> float:
        """Return how long this server has waited for weights and sums since `begin`, in seconds."""
        return self._waited_s + (self._sums.waited_s if self._sums is not None else 0.0)

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the entries of `tensors`, keyed by weight name, whose weights this server owns."""
        return {n: t for n, t in tensors.items() if self.owners[n] == self._ranks.rank}

    def begin_sharing(self) -> None:
        """Free all weights that other servers own. From then on, layers gather weights on use.

        Call this method once, after loading the initial weights or a checkpoint.
        """
        marked = (m.__dict__.get("_cleave") for m in self._model.modules())
        self._operands = list({id(o): o for o in marked if o is not None}.values())
        for number, module in enumerate(self._modules, start=1):
            module.register_forward_pre_hook(partial(self._before_forward, number))
            module.register_forward_hook(partial(self._after_forward, number))
        for unit in self._units:
            self._free(unit)

    def begin(self, passes: int, new_sums: Callable[[], GradientSums] | None) -> None:
        """Begin a training step or an evaluation: set the schedule of exchanges.

        Args:
            passes: largest number of passes that any server computes.
            new_sums: creates the `GradientSums` of one pass; None for an evaluation.
        """
        self._schedule = exchanges(passes, len(self._modules), backward=new_sums is not None)
        self._passes, self._next = passes, 0
        self._new_sums, self._found = new_sums, {}
        self._waited_s = 0.0

    @contextmanager
    def computing(self, left: int) -> Iterator[None]:
        """Return a context manager that gathers and frees weights during one pass.

        Args:
            left: number of passes that this server computes after this pass.
        """
        self._pass, self._in_backward = self._passes - 1 - left, False
        try:
            if not self._next:  # first gather the weights outside the layers, for the whole step
                self._do_next()
            yield
            for exchange in self._schedule[self._next :]:
                if exchange.number > self._pass:
                    break
                self._do_next()
        except BaseException:
            self._free_all()
            raise
        finally:
            self._pass = None

    def finish(self) -> list[str]:
        """Perform the step's remaining exchanges. Return the names of weights with a gradient.

        Every server calls `finish` after its last pass, even if the server abandoned that pass.
        """
        while self._next < len(self._schedule):
            self._do_next()
        self._free_all()
        return [name for name in self.order if name in self._found]

    @contextmanager
    def evaluating(self, passes: int) -> Iterator[None]:
        """Return a context manager that begins and finishes an evaluation; see `begin`."""
        self.begin(passes, None)
        try:
            yield
        except LostServerError:
            raise
        except CleaveError:
            self.finish()  # other servers wait for this server's exchanges
            raise
        self.finish()

    def updated(self) -> None:
        """Invalidate cached operands after the optimizer has updated the weights."""
        for operands in self._operands:
            operands.updated()

    def _come_to(self, here: Exchange) -> None:
        """Perform all exchanges through `here`. Raise UsageError if `here` is not scheduled."""
        while self._next < len(self._schedule):
            if self._do_next(here) == here:
                return
        raise UsageError(
            f"--memory is 'sharded', but {type(self._model).__name__} does not call its layers one "
            "after another, once each; use --memory recompute"
        )

    def _do_next(self, kept: Exchange | None = None) -> Exchange:
        """Perform and return the next exchange. Unless it is `kept`, free the layer's weights."""
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
        """Replace weights of other servers with NaN scalars, expanded to the weights' shapes."""
        for weight in unit.others:
            weight.data = self._nothing[weight.dtype].expand(weight.shape)

    def _free_all(self) -> None:
        """Free all gathered weights that other servers own, after a finished or abandoned step."""
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

    def _before_forward(self, unit: int, module: nn.Module, arguments: Any) -> None:
        if self._pass is None:
            raise RuntimeError("the weights of this layer are on other servers now")
        if not self._in_backward:  # a recomputed layer already has its weights
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
    """Map each weight's name to its owner's rank. Balance trained and frozen weights separately."""
    found: dict[str, int] = {}
    for trained in (True, False):
        sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad is trained}
        found |= dict(zip(sizes, owners_of(list(sizes.values()), count), strict=True))
    return found


def _parts(model: Any) -> list[nn.Module]:
    """Return the modules whose weights are gathered on use: decoder layers and any untied head."""
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
    """Return a list of weight names for each part, preceded by a list of all other weights.

    Weights that belong to several parts are in the first list.
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
