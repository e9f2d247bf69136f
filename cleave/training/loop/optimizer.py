"""Optimizer updates with gradient clipping, loss scaling and a learning rate schedule.

Parameters are updated after or during the backward pass. With several servers, each server updates
the parameters that it owns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar, assert_never

import torch
from torch import Tensor, nn

from cleave.errors import CleaveError, UsageError
from cleave.training.loop.finite import DivergedError, check_loss, check_norm, is_finite
from cleave.training.loop.job import Decay, JobSpec, OptimizerKind
from cleave.training.loop.state_files import StateFiles
from cleave.training.lora.adapters import is_linear
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import Alone, Ranks, owners_of
from cleave.training.servers.shared_weights import SharedWeights

LOSS_SCALE: Final = "loss_scale"  # key of the loss scale's state in a checkpoint's metadata
_GROWS_AFTER: Final = 2000  # steps without overflow
_LEAST: Final = 2.0**-14  # if gradients overflow with a smaller loss scale, the run has diverged


@dataclass(slots=True)
class LossScale:
    """Dynamic loss scaling, which keeps fp16 gradients from underflowing.

    The loss is multiplied by `factor` before the backward pass, and the gradients are divided by
    `factor`. If the gradients of a step overflow, the step is skipped and the factor is halved.
    After 2000 steps without overflow, the factor is doubled (arXiv 1710.03740, section 3.2). This
    is the algorithm of `torch.amp.GradScaler`, which cannot update one parameter at a time. The
    factor is a power of two, so scaling causes no rounding errors.

    `updates` is the total number of steps that have updated parameters.
    """

    factor: float = 65536.0
    since_overflow: int = 0
    updates: int = 0

    def overflowed(self) -> None:
        """Halve the loss scale after a step whose gradients are not finite.

        Raises:
            DivergedError: if the loss scale is too small to have caused the overflow.
        """
        self.factor /= 2
        self.since_overflow = 0
        if self.factor < _LEAST:
            raise DivergedError(
                f"its gradients overflow in fp16 with a loss scale of {self.factor:g}"
            )

    def updated(self) -> None:
        """Count a step without overflow. Double the loss scale after 2000 such steps in a row."""
        self.updates += 1
        self.since_overflow += 1
        if self.since_overflow == _GROWS_AFTER:
            self.factor *= 2
            self.since_overflow = 0

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Load the loss scale's state from a checkpoint's metadata.

        Raises:
            CleaveError: if `state` is None, which means that the checkpoint has no loss scale.
        """
        if state is None:
            raise CleaveError("the checkpoint has no loss scale, so it is not from an fp16 run")
        for name in asdict(self):
            setattr(self, name, state[name])


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule with linear warm-up to `peak`, followed by a decay.

    `floor` is the learning rate at the end of the decay, as a fraction of `peak`.
    """

    peak: float
    warmup_steps: int
    steps: int
    decay: Decay = Decay.COSINE
    floor: float = 0.1
    decay_steps: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first = self.warmup_steps
        if self.decay is Decay.WSD:
            first = max(first, self.steps - self.decay_steps)
        share = min(1.0, max(0.0, (step - first) / max(1, self.steps - first)))
        match self.decay:
            case Decay.CONSTANT:
                left = 1.0
            case Decay.COSINE:
                left = 0.5 * (1 + math.cos(math.pi * share))
            case _:
                left = 1 - share
        return self.peak * (self.floor + (1 - self.floor) * left)


_EPS = 1e-8
_MATRIX = 2  # number of dimensions of a matrix
_T = TypeVar("_T")
_STATE = "optimizer."  # prefix of the names of optimizer state tensors in a checkpoint


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The kind and settings of an optimizer. Weight decay applies to matrices, not to vectors.

    The default betas are those used to train OPT (arXiv 2205.01068, section 2.2).
    """

    kind: OptimizerKind = OptimizerKind.ADAMW
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    eps: float = _EPS

    def decay_of(self, parameter: Tensor) -> float:
        """Return the weight decay of a parameter."""
        return self.weight_decay if parameter.ndim > 1 else 0.0

    @property
    def moments(self) -> tuple[str, ...]:
        """Return torch's names for a parameter's optimizer moments.

        Raises:
            UsageError: if devices cannot run the update.
        """
        match self.kind:
            case OptimizerKind.ADAMW:
                return "exp_avg", "exp_avg_sq"
            case OptimizerKind.SGD:
                return ("momentum_buffer",) if self.momentum else ()
            case _:
                raise UsageError(f"devices cannot run {self.kind.value} updates; use adamw or sgd")

    def optimizer(self, parameter: nn.Parameter, *, hidden: bool) -> torch.optim.Optimizer:
        """Create a torch optimizer for one parameter. The caller sets the learning rate.

        Args:
            hidden: whether the parameter is the weight matrix of a hidden layer.
        """
        decay = self.decay_of(parameter)
        match self.kind:
            case OptimizerKind.SGD:
                return torch.optim.SGD(
                    [parameter], momentum=self.momentum, weight_decay=decay, fused=True
                )
            case OptimizerKind.ADAFACTOR:
                return torch.optim.Adafactor([parameter], weight_decay=decay)
            case OptimizerKind.MUON if hidden:
                return torch.optim.Muon(
                    [parameter],
                    weight_decay=decay,
                    momentum=self.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            case OptimizerKind.ADAMW | OptimizerKind.MUON:
                return torch.optim.AdamW(
                    [parameter], betas=self.betas, eps=self.eps, weight_decay=decay, fused=True
                )
            case _:
                assert_never(self.kind)


def update_rule(job: JobSpec) -> UpdateRule:
    """Return the kind and settings of the optimizer that a job specifies."""
    betas = job.beta1, job.beta2
    return UpdateRule(OptimizerKind(job.optimizer), job.weight_decay, betas, job.momentum)


@dataclass(frozen=True, slots=True)
class DeviceUpdates:
    """Updates of the parameters whose state is on devices.

    Attributes:
        names: names of these parameters.
        squares: returns the sum of the parameters' squared gradients in the current step.
        update: updates the parameters, given the learning rate and the factor by which clipping
            multiplies gradients.
    """

    names: Set[str]
    squares: Callable[[], float]
    update: Callable[[float, float], None]


class Optimizer:
    """The optimizer of a model's trained parameters, with one torch optimizer for each parameter.

    Args:
        clip: maximum global norm of the gradients; 0 for no clipping.
        in_backward: whether to update each parameter during the backward pass, as soon as its
            gradient is complete, and then free the gradient. The result is the same, but only one
            gradient at a time is in memory. With clipping or a loss scale, an additional first
            backward pass computes the global norm and detects overflows.
        files: stores the optimizer state in files; None to store it in memory.
        scale: the loss scale; None if the loss is not scaled.
        ranks: the servers that train the model together; None for a single server. With several
            servers, `in_backward` must be False, because gradients are summed before the update.
        weights: the sharded weights; None if each server stores all weights.

    Attributes:
        applied: True if the current step has already updated some parameters.
        on_devices: the updates that devices run; None if this optimizer runs all updates.
        update_s: total time, in seconds, of clipping and updates after backward passes.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        *,
        clip: float,
        in_backward: bool,
        files: StateFiles | None = None,
        scale: LossScale | None = None,
        ranks: Ranks | None = None,
        weights: SharedWeights | None = None,
    ) -> None:
        self._ranks = ranks or Alone()
        self._weights = weights
        if in_backward and self._ranks.count > 1:
            raise ValueError("several servers cannot update in the backward pass")
        self.clip = clip
        self.rule = rule
        self.on_devices: DeviceUpdates | None = None
        self.scale = scale
        self.in_backward = in_backward
        self.applied = False
        self.update_s = 0.0
        self._files = files
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        owners = owners_of(sizes, self._ranks.count)
        self._owners = dict(zip(self.parameters, owners, strict=True))
        if weights is not None:
            self._owners = weights.owners
        self._sums: GradientSums | None = None
        self._rate = 0.0
        self._found: list[str] = []  # parameters with a gradient on any server
        embeddings = _embeddings(model)
        hidden = _matrices(model) - embeddings
        self._optimizers = {
            name: rule.optimizer(parameter, hidden=id(parameter) in hidden)
            for name, parameter in self.parameters.items()
            if self._owners[name] == self._ranks.rank
        }
        # Layers come first, because devices need them first, and the embedding is large.
        self._order = sorted(
            self._optimizers, key=lambda name: id(self.parameters[name]) in embeddings
        )

    def step(self, rate: float, backward: Callable[[], float]) -> float:
        """Compute gradients, update the parameters, and return the loss.

        Args:
            backward: computes the gradients and returns the loss. With `in_backward` and either
                clipping or a loss scale, it is called twice and must compute equal gradients.

        Raises:
            DivergedError: if the loss or the gradients are not finite. No parameter has changed,
                unless `in_backward` is set and `backward` is called only once.
        """
        self._begin(rate)
        if self.in_backward:
            loss = self._step_in_backward(backward)
        else:
            loss = backward()
            self._step(loss)
        self.applied = False
        return loss

    def step_whole(
        self,
        rate: float,
        gradients: Callable[[], float | _T],
        updated: Callable[[Tensor], None] = lambda _: None,
    ) -> float | _T:
        """Update the parameters with gradients from the fleet; return the result of `gradients`.

        Args:
            gradients: computes all gradients and returns the loss. If it returns anything but a
                float, no parameter is updated.
            updated: called with each parameter as soon as it is updated.

        Raises:
            DivergedError: if the loss or the gradients are not finite. No parameter is updated.
        """
        self._begin(rate)
        loss = gradients()
        if isinstance(loss, float):
            self._step(loss, updated)
            self.applied = False
        return loss

    def _begin(self, rate: float) -> None:
        self.forget_gradients()
        if self._ranks.count > 1 and self._weights is None:
            self._sums = GradientSums(self._ranks, self.parameters, self._owners)
        self._rate = rate
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = rate

    def begin_passes(self, passes: int) -> None:
        """Begin a step with sharded weights and at most `passes` passes per server."""
        weights = self._weights
        assert weights is not None
        parameters = {name: self.parameters[name] for name in weights.order}
        weights.begin(passes, lambda: GradientSums(self._ranks, parameters, self._owners))

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """Send each gradient to its owner as soon as the pass in the `with` block completes it.

        With one server, or with sharded weights, do nothing.
        """
        sums = self._sums
        if sums is None:
            yield
            return

        def sending(name: str) -> Callable[[Tensor], None]:
            return lambda _: sums.complete(name)

        with self._hooked({name: sending(name) for name in self.parameters}):
            yield

    @property
    def waited_s(self) -> float:
        """Return the seconds that this server has waited for other servers in the current step."""
        exchanging = self._weights or self._sums
        return exchanging.waited_s if exchanging is not None else 0.0

    def add_up(self) -> None:
        """Sum the gradients over all servers. Each server keeps the sums for its own parameters.

        Every server must call this method once per step, even if its part of the step has failed.
        """
        exchanging = self._weights or self._sums
        assert exchanging is not None
        self._found, self._sums = exchanging.finish(), None

    def forget_gradients(self) -> None:
        """Free the gradients of all trained parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _step(self, loss: float, updated: Callable[[Tensor], None] = lambda _: None) -> None:
        began_s = time.perf_counter()
        check_loss(loss)
        if self.scale is not None and not self._unscale(self.scale):
            return
        factor = self._clip()
        devices = self.on_devices
        if devices is not None:
            devices.update(self._rate, factor)
        for name in self._order:
            if devices is None or name not in devices.names:
                self._update(name)
                updated(self.parameters[name])
        if self._weights is not None:
            self._weights.updated()
        else:
            self._ranks.spread(
                [self.parameters[name].detach() for name in self._found],
                [self._owners[name] for name in self._found],
            )
        self.update_s += time.perf_counter() - began_s

    def hand_over(self, name: str, files: StateFiles | None = None) -> tuple[int, list[Tensor]]:
        """Prepare a parameter that devices will update with AdamW or SGD.

        With `files`, the parameter and its moments are moved to files.

        Returns:
            The number of updates so far (0 with SGD), and the moments, initially zeros.
        """
        parameter = self.parameters[name]
        state = self._optimizers[name].state[parameter]
        keys = self.rule.moments
        if self.rule.kind is OptimizerKind.ADAMW:
            state.setdefault("step", torch.tensor(0.0))
        for key in keys:
            if state.get(key) is None:
                state[key] = torch.zeros_like(parameter)
        if files is not None:
            files.move(state)
            moved: dict[str, Any] = {name: parameter.data}
            files.move(moved)
            parameter.data = moved[name]
        return int(state.get("step", 0)), [state[key] for key in keys]

    def count_updates(self, name: str, updates: int) -> None:
        """Count updates of a parameter that devices have run."""
        state = self._optimizers[name].state[self.parameters[name]]
        if "step" in state:
            state["step"] += updates

    def forget_state(self, name: str) -> None:
        """Discard the optimizer state of a parameter, as before its first update."""
        self._optimizers[name].state.pop(self.parameters[name], None)

    def _clip(self) -> float:
        """Clip the gradients by global norm, and return the factor.

        Raises:
            DivergedError: if the norm is not finite.
        """
        owned = [self.parameters[name] for name in self._optimizers]
        norm = nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None])
        if self._ranks.count > 1:
            parts = self._ranks.agree([norm.item()])
            norm = torch.linalg.vector_norm(torch.tensor(parts))
        if self.on_devices is not None:
            norm = torch.tensor(math.sqrt(norm.item() ** 2 + self.on_devices.squares()))
        check_norm(norm.item())
        if not self.clip:
            return 1.0
        nn.utils.clip_grads_with_norm_(owned, self.clip, norm)
        return min(1.0, self.clip / (norm.item() + 1e-6))  # as in `clip_grads_with_norm_`

    def _unscale(self, scale: LossScale) -> bool:
        """Divide the gradients by the loss scale. Return False if they overflow on any server."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / scale.factor)
        finite = all(map(is_finite, gradients))
        if all(self._ranks.agree(finite)):
            scale.updated()
            return True
        scale.overflowed()
        return False

    def _update(self, name: str) -> None:
        """Update one parameter and move new optimizer state to a file if `files` is set."""
        self.applied = True
        optimizer, parameter = self._optimizers[name], self.parameters[name]
        optimizer.step()
        # Fused optimizers do not increment the version by which `ModelWork` notices changes.
        torch.autograd.graph.increment_version(parameter)
        if self._files is not None:
            self._files.move(optimizer.state[parameter])

    def _step_in_backward(self, backward: Callable[[], float]) -> float:
        scale, unscaled = 1.0, 1 / self.scale.factor if self.scale is not None else 1.0
        # Whether a first backward pass computes the norm before any parameter is updated.
        known = bool(self.clip) or self.scale is not None
        if known:
            squares: list[Tensor] = []
            overflowed = False

            def note_norm(parameter: Tensor) -> None:
                nonlocal overflowed
                assert parameter.grad is not None
                overflowed |= not is_finite(parameter.grad)
                squares.append(torch.linalg.vector_norm(parameter.grad.mul_(unscaled)))
                parameter.grad = None

            with self._hooked(dict.fromkeys(self.parameters, note_norm)):
                loss = backward()
            if self.scale is not None and overflowed:
                self.scale.overflowed()
                return loss
            norm = torch.linalg.vector_norm(torch.stack(squares)).item()
            check_norm(norm)
            if self.clip:  # as in torch.nn.utils.clip_grad_norm_
                scale = min(1.0, self.clip / (norm + 1e-6))

        def stepping(name: str) -> Callable[[Tensor], None]:
            def step(parameter: Tensor) -> None:
                assert parameter.grad is not None
                if not known:
                    check_norm(torch.linalg.vector_norm(parameter.grad).item())
                if unscaled != 1.0:
                    parameter.grad.mul_(unscaled)
                if self.clip and scale != 1.0:
                    parameter.grad.mul_(scale)
                self._update(name)
                parameter.grad = None

            return step

        with self._hooked({name: stepping(name) for name in self.parameters}):
            loss = backward()
        if self.scale is not None:
            self.scale.updated()
        return loss

    @contextmanager
    def _hooked(self, hooks: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
        """In the `with` block, call each parameter's hook once its gradient is complete."""
        handles = [
            self.parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for name, hook in hooks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def parameter_of(name: str) -> str:
        """Return the parameter's name, given the name of a tensor from `tensors`."""
        return name.removeprefix(_STATE).partition(".")[2]

    def tensors(self) -> dict[str, Tensor]:
        """Return this server's optimizer state by tensor name; empty before the first update."""
        state = {}
        for name, optimizer in self._optimizers.items():
            for key, value in optimizer.state.get(self.parameters[name], {}).items():
                if isinstance(value, Tensor):
                    state[f"{_STATE}{key}.{name}"] = value
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this server's optimizer state from a checkpoint's tensors.

        Parameters that have never had a gradient have no state in the checkpoint.

        Raises:
            CleaveError: if the optimizer needs state and the checkpoint has none.
        """
        held: dict[str, dict[str, Tensor]] = {}
        for full, value in tensors.items():
            if full.startswith(_STATE):
                key, _, name = full.removeprefix(_STATE).partition(".")
                held.setdefault(name, {})[key] = value
        keep_state = [name for name, each in self._optimizers.items() if _keeps_state(each)]
        if keep_state and not held.keys() & self.parameters.keys():
            raise CleaveError(
                f"the checkpoint has no optimizer state for {keep_state[0]!r}; it belongs to "
                f"another model, or was not written by cleave"
            )
        for name, optimizer in self._optimizers.items():
            if name not in held:
                continue
            # Copy the values: the tensors may be memory-mapped from the checkpoint's file.
            state: dict[str, Any] = {key: value.clone() for key, value in held[name].items()}
            if self._files is not None:
                self._files.move(state)
            optimizer.state[self.parameters[name]] = state


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True unless the optimizer is SGD without momentum, which has no state."""
    return not isinstance(optimizer, torch.optim.SGD) or bool(optimizer.defaults["momentum"])


def _matrices(model: nn.Module) -> set[int]:
    """Return the `id` of each linear layer's weight matrix."""
    return {id(m.weight) for m in model.modules() if is_linear(m) and m.weight.ndim == _MATRIX}


def _embeddings(model: Any) -> set[int]:
    """Return the `id` of each parameter of the embedding and of the LM head."""
    gets = ("get_input_embeddings", "get_output_embeddings")
    modules = [getattr(model, get)() for get in gets if hasattr(model, get)]
    return {id(p) for module in modules if module is not None for p in module.parameters()}
