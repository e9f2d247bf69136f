"""Training by stages in the caller's own loop: `cleave.offload(model, fleet, method="stages")`.

A forward pass records the layers' keyword arguments, runs all layers on the fleet, and computes the
rest locally. The backward pass returns the gradients of all layers at once. If the model has
changed since its graphs were exported, the next forward pass exports them again.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cleave.arrays import DType
from cleave.errors import FleetError, LayerGraphError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.selection import measure_ps
from cleave.fleet.server_speed import graphs_here
from cleave.graphs.calls import Embedded, OutsideLayers, decoder_layers
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_parts import tensors_of
from cleave.graphs.model_graphs import model_graphs
from cleave.graphs.model_state import content, model_state
from cleave.graphs.packed import PackedBy
from cleave.machine.backends import TorchBackend
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.planner.stages.search import plan_stages
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    StepFailed,
    StepResult,
)
from cleave.scheduler.stages.work import StageFailedError, StepWork
from cleave.training.stages.audits import Auditor
from cleave.training.stages.gradients import StepGradients
from cleave.training.stages.ps_passes import described_refusals
from cleave.training.stages.stage_work import ModelWork, Sent
from cleave.training.stages.staged import Rows, StagedModel
from cleave.training.stages.staged_module import plain

_log = logging.getLogger(__name__)

_OF_THE_MODEL: Final = ("input_ids", "attention_mask", "position_ids", "labels", "use_cache",
                        "return_dict", "logits_to_keep", "output_attentions",
                        "output_hidden_states", "num_items_in_batch")  # fmt: skip
_NO_OUTPUTS: Final = ("output_attentions", "output_hidden_states")
_MOST_KEPT: Final = 8  # maximum number of cached graph sets, such as with and without adapters


@dataclass(frozen=True, slots=True)
class _Called:
    """Cache key of a `StagedModel`. `state` is the value that `model_state` returned."""

    tokens: int
    padded: bool
    packed: bool
    dtype: DType
    state: str


class StagedForward:
    """Replacement of a model's forward pass that runs the layers on a fleet by stages.

    Args:
        audit: probability of an output audit, per device, stage and step.
        local_after_s: seconds without devices after which layers run locally; None to wait for
            devices without limit.
    """

    def __init__(
        self, model: nn.Module, fleet: Fleet, audit: float, local_after_s: float | None = None
    ) -> None:
        self._model = model
        self._fleet = fleet
        self._auditor = Auditor(audit, open_graph=graphs_here())
        self.local_after_s = local_after_s
        self._plain_forward = type(model).forward.__get__(model)
        self._signature = inspect.signature(self._plain_forward)
        self._sent = Sent(changing=True)
        self._speeds: dict[DType, PsCompute] = {}
        self._staged: OrderedDict[_Called, StagedModel] = OrderedDict()  # least recently used first
        self._under_way: _Pass | None = None
        self._here = False  # whether the last log message said that layers now run locally

    def close(self) -> None:
        """End the current step and tell devices to drop all arrays of the model."""
        self._fleet.runtime.end_steps()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass with the layers on the fleet, or locally as a fallback."""
        # The plan decides which activations devices recompute.
        with _without_checkpointing(self._model):
            found = self._forward(args, kwargs)
        return self._plain_forward(*args, **kwargs) if found is None else found

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward pass on the fleet; return None if the caller must run it locally."""
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        unknown = [n for n, v in given.items() if n not in _OF_THE_MODEL and v is not None]
        asked = [n for n in _NO_OUTPUTS if given.get(n)]
        config: Any = self._model.config
        asked += [
            f"config.{n}" for n in _NO_OUTPUTS if given.get(n) is None and getattr(config, n, False)
        ]
        if unknown or asked or given.get("input_ids") is None:
            names = ", ".join(unknown + asked) or "no input_ids"
            raise UsageError(
                f"a model that is trained by stages was called with {names}; call it with "
                f"input_ids and attention_mask only (generate with use_cache=False), or offload it "
                f"by tiles"
            )
        ids, mask, keeps = given["input_ids"], given.get("attention_mask"), given.get("use_cache")
        keeps = getattr(config, "use_cache", False) if keeps is None else keeps
        positions = given.get("position_ids")
        if positions is not None:
            positions = positions.expand(ids.shape)
            if bool((positions == torch.arange(ids.shape[1])).all()):
                positions = None  # these are the model's default positions
            elif mask is None and keeps:
                # With a key-value cache, a model ignores document boundaries. Without a cache, a
                # mask that makes each sequence one document gives the same output.
                mask = torch.ones_like(ids)
        if mask is not None and positions is None and bool(mask.all()):
            mask = None  # transformers also ignores a mask without padding
        try:
            return self._on_fleet(Rows(ids, ids, mask, positions), args, kwargs)
        except LayerGraphError as error:
            raise UsageError(
                f"{type(self._model).__name__} cannot be trained by stages: {error}; fix this, or "
                f"offload the model by tiles"
            ) from error

    def _on_fleet(self, batch: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _unmerge_disabled_adapters(self._model)
        tokens, packed = batch.ids.shape[1], batch.positions is not None
        staged = self._of(tokens, padded=batch.mask is not None, packed=packed)
        one = _Pass(self, staged, torch.is_grad_enabled())
        with plain(self._model):
            one.prepare(batch)
        if one.plan is None:
            self.tell("no connected device can train whole layers")
            return None
        trained = staged.trained_parameters()

        def through(x: Tensor) -> Tensor:
            found: Tensor = _Layers.apply(one, x, *trained)  # type: ignore[no-untyped-call]
            return found

        try:
            with OutsideLayers(self._model, staged.calls).layers_as_one(through):
                found = self._plain_forward(*args, **{**kwargs, "use_cache": False})
        except StageFailedError as error:
            self.fall_back(one, error)
            return None
        self.tell("")
        return found

    def fall_back(self, one: _Pass, error: StageFailedError) -> None:
        """End a pass that failed on the fleet. Raise FleetError unless layers may run locally."""
        if self.local_after_s is None:
            raise FleetError(str(error)) from error
        self.end(one)
        self.tell(str(error))

    def tell(self, why_here: str) -> None:
        """Log why layers run locally or, if `why_here` is empty, that they run on the fleet again.

        Repeated messages are skipped.
        """
        if bool(why_here) == self._here:
            return
        self._here = bool(why_here)
        if self._here:
            _log.warning("%s; running layers locally until devices join", why_here)
        else:
            _log.info("devices have joined; their layers run on the fleet again")

    def _of(self, tokens: int, *, padded: bool, packed: bool) -> StagedModel:
        dtype = DType.FP32
        if torch.is_autocast_enabled("cpu"):
            cast = torch.get_autocast_dtype("cpu")
            if cast is not torch.bfloat16:
                raise UsageError(
                    f"autocast is on with {cast}, but stages support only bfloat16 and float32; "
                    f"use one of these, or offload(..., method='tiles')"
                )
            dtype = DType.BF16
        state = model_state(self._model, decoder_layers(self._model))
        called = _Called(tokens, padded, packed, dtype, state)
        if called not in self._staged:
            self._staged[called] = self._new(called)
            self._sent.keep_only([*self._model.parameters(), *self._model.buffers()])
            if len(self._staged) > _MOST_KEPT:
                self._staged.popitem(last=False)
        self._staged.move_to_end(called)
        return self._staged[called]

    def _new(self, called: _Called) -> StagedModel:
        """Export the current layers as graphs and return a `StagedModel` that uses them."""
        # The model itself interprets position IDs, as in a local forward pass.
        by = PackedBy.POSITIONS if called.packed else None
        cache = GraphCache.of_user()
        # Graphs compute in fp32, so they are exported without autocast.
        with plain(self._model), torch.autocast("cpu", enabled=False):
            graphs = model_graphs(
                self._model, called.tokens, cache,
                padded=called.padded, packed=by, with_loss=False,
            )  # fmt: skip
        if said := described_refusals(graphs):
            _log.warning(said)
        if called.dtype not in self._speeds:
            speed = measure_ps(TorchBackend(), called.dtype, time.perf_counter)
            self._speeds[called.dtype] = PsCompute(speed.flops_per_s, 0.0)
        return StagedModel(
            ModelWork(self._model, graphs, called.dtype, sent=self._sent),
            self._fleet.runtime,
            _plan_layers,
            self._speeds[called.dtype],
            auditor=self._auditor,
            local_after_s=self.local_after_s,
        )

    def begin(self, one: _Pass) -> None:
        """Register a new forward pass. Abandon an earlier pass whose backward pass has not run."""
        if self._under_way is not None:
            self._under_way.given_up = True
            self._fleet.runtime.withdraw_step()
        self._under_way = one

    def end(self, one: _Pass) -> None:
        """Unregister a pass that no longer needs the fleet."""
        if self._under_way is one:
            self._under_way = None


def _unmerge_disabled_adapters(model: nn.Module) -> None:
    """Unmerge disabled peft adapters, as their layers' forward pass would do.

    The rounding of the restored weights depends on autocast. So the adapters must be unmerged with
    the caller's autocast setting, and not while layers are exported without autocast.
    """
    each: Any
    for each in model.modules():
        if getattr(each, "merged", False) and getattr(each, "disable_adapters", False):
            each.unmerge()


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Return a context manager that disables transformers' activation checkpointing."""
    those = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    # Checkpointing also installs a hook that sets `requires_grad` of the embedding's output.
    hooks = [
        (m, key, hook)
        for m in model.modules()
        for key, hook in m._forward_hooks.items()
        if getattr(hook, "__name__", "") == "make_inputs_require_grads"
    ]
    for module in those:
        vars(module)["gradient_checkpointing"] = False
    for module, key, _ in hooks:
        del module._forward_hooks[key]
    try:
        yield
    finally:
        for module in those:
            vars(module)["gradient_checkpointing"] = True
        for module, key, hook in hooks:
            module._forward_hooks[key] = hook


def _plan_layers(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """Plan stages without a vocabulary-parallel loss, because the caller computes the loss."""
    return plan_stages(replace(model, most_slices=1), devices, ps)


@dataclass(eq=False)
class _Pass:
    """A forward pass through all layers and its backward pass."""

    owner: StagedForward
    staged: StagedModel
    trains: bool  # whether gradients are enabled; if so, a backward pass may follow
    done: bool = False
    given_up: bool = False
    parts: Sequence[Rows] = ()
    embedded: Sequence[Embedded] = ()
    plan: StagePlan | None = None
    step: StepWork | None = None
    x: Tensor | None = None
    values: Mapping[int, bytes] = field(default_factory=dict)  # digests of tensors, by `id`

    def prepare(self, batch: Rows) -> None:
        """Plan the stages and record the layers' arguments for each micro-batch."""
        plan = self.staged.planned(batch)
        self.plan = plan if isinstance(plan, StagePlan) else None
        self.parts = self.staged.cut(batch)
        with torch.set_grad_enabled(self.trains):  # records which inputs require gradients
            self.embedded = [self.staged.embed(part) for part in self.parts]

    def _split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Split a tensor of the batch into one tensor per micro-batch."""
        return torch.split(tensor, [len(part.ids) for part in self.parts])

    def forward(self, x: Tensor, *, backward: bool) -> Tensor:
        """Run all layers on the fleet and return the last layer's output.

        Args:
            backward: whether a backward pass will follow.

        Raises:
            StageFailedError: if the fleet cannot complete the pass.
        """
        staged, work, passes = self.staged, self.staged.work, self.staged.passes
        self.owner.begin(self)
        assert self.plan is not None
        self.x = x.detach()
        if backward:
            self.values = self._values()
        stages = tuple(replace(stage, loss=False) for stage in self.plan.stages)
        pieces = self._split(x.detach())
        pairs = zip(pieces, self.embedded, strict=True)
        given = staged.first_inputs(
            [Embedded(piece.requires_grad_(backward), one.extras) for piece, one in pairs]
        )
        self.step = staged.step_work(replace(self.plan, stages=stages), self.parts, given, 1.0)
        staged.runtime.begin_step(self.step)
        outputs: dict[int, Tensor] = {}
        while len(outputs) < len(self.parts):
            match staged.next_outcome():
                case InputWanted() as wanted:
                    staged.pass_on(wanted, self.step, given)
                case OutputReady(n, payload):
                    y = work.tensor(payload, pieces[n].shape)
                    outputs[n] = passes.forward(len(self.step.layers), n, y, given[n].extras)
                case StepFailed(reason):
                    raise StageFailedError(f"the step by stages cannot be completed: {reason}")
                case _:
                    raise AssertionError("a step ended before its backward pass")
        if not backward:
            passes.forget()
            staged.runtime.withdraw_step()
            self.owner.end(self)
        return torch.cat([outputs[number] for number in range(len(self.parts))])

    def backward(self, dy: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the gradient of the first layer's input, and parameter gradients by `id`.

        Args:
            dy: gradient of the last layer's output.

        Raises:
            UsageError: if the backward pass has already run, if the forward pass was abandoned, or
                if a weight has changed since the forward pass.
            FleetError: if the fleet cannot complete the pass, or if a device returned a wrong
                result.
        """
        if self.done:
            raise UsageError(
                "a model offloaded by stages allows only one backward pass per forward pass"
            )
        self.done = True
        if self.given_up or self.step is None:
            raise UsageError(
                "another forward pass ran before this backward pass; with a model offloaded by "
                "stages, run each backward pass right after its forward pass"
            )
        if self._values() != self.values:
            raise UsageError(
                "the weights of the model's layers changed between a forward pass and its backward "
                "pass; change them only after the backward pass"
            )
        staged, work, passes = self.staged, self.staged.work, self.staged.passes
        try:
            result = self._result(dy, self.step)
        except StageFailedError as error:
            self.owner.fall_back(self, error)
            return self._backward_here(dy)
        self.owner.end(self)
        staged.refuse_faults(self.step, result)
        dx = [
            passes.backward(0, n, work.tensor(result.dx[n], piece.shape))
            for n, piece in enumerate(self._split(dy))
        ]
        found = StepGradients(work, staged.gradients_dtype)
        found.read(result.gradients)
        return torch.cat(dx), passes.add_gradients(found.total())

    def _values(self) -> dict[int, bytes]:
        """Return the digest of each parameter and buffer of the layers, by tensor `id`."""
        held = (t for call in self.staged.calls for t in tensors_of(call.layer).values())
        return {id(tensor): content(tensor) for tensor in held}

    def _result(self, dy: Tensor, step: StepWork) -> StepResult:
        """Send the gradient of the last layer's output to the fleet and wait for the result."""
        for number, piece in enumerate(self._split(dy)):
            made = self.staged.passes.backward(len(step.layers), number, piece)
            self.staged.runtime.give(number, self.staged.work.activation(made))
        while True:
            match self.staged.next_outcome():
                case GradientWanted() as wanted:
                    self.staged.pass_on(wanted, step, self.embedded)
                case StepFailed(reason):
                    raise StageFailedError(f"the step by stages cannot be completed: {reason}")
                case StepResult() as result:
                    return result

    def _backward_here(self, dy: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the result of `backward` locally, by recomputing the forward pass."""
        assert self.x is not None
        trained = self.staged.trained_parameters()
        dx: list[Tensor] = []
        total: dict[int, Tensor] = {}
        pieces = zip(self._split(self.x), self.embedded, self._split(dy), strict=True)
        for piece, one, gradient in pieces:
            y = piece.requires_grad_()
            with torch.enable_grad(), self.staged.autocast():
                for call, extras in zip(self.staged.calls, one.extras, strict=True):
                    y = call.run({}, y, extras)
            inputs = [piece, *trained]
            found = torch.autograd.grad(y, inputs, gradient.to(y.dtype), allow_unused=True)
            dx.append(found[0])
            for parameter, made in zip(trained, found[1:], strict=True):
                if made is not None:
                    total[id(parameter)] = total.get(id(parameter), 0.0) + made
        return torch.cat(dx), total


class _Layers(torch.autograd.Function):
    """Autograd function that runs all layers of a model on a fleet."""

    @staticmethod
    def forward(ctx: Any, one: _Pass, x: Tensor, *trained: Tensor) -> Tensor:
        needed = one.trains and any(ctx.needs_input_grad)
        ctx.one, ctx.trained = one, [id(parameter) for parameter in trained]
        return one.forward(x, backward=needed).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,) = grads
        dx, found = ctx.one.backward(dy)
        return None, dx.to(dy.dtype), *(found.get(key) for key in ctx.trained)
