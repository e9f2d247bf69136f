"""Optimizer updates with gradient clipping, after or during the backward pass.

With several servers, each server updates the parameters that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cleave.errors import CleaveError
from cleave.training.loop.finite import DivergedError, check_loss, check_norm, is_finite
from cleave.training.loop.job import JobSpec, OptimizerKind
from cleave.training.loop.loss_scale import LossScale
from cleave.training.loop.state_files import StateFiles
from cleave.training.lora.adapters import is_linear
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import Alone, Ranks, owners_of
from cleave.training.servers.shared_weights import SharedWeights

_EPS = 1e-8
_MATRIX = 2  # number of dimensions of a matrix
_T = TypeVar("_T")
_STATE = "optimizer."  # prefix of the names of optimizer state tensors in a checkpoint


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The optimizer and its settings.

    Attributes:
        kind: the optimizer.
        weight_decay: weight decay of parameters with at least 2 dimensions.
        betas: decay rates of AdamW's moments. The default values are those with which OPT was
            trained (arXiv 2205.01068, section 2.2).
        momentum: momentum of SGD and Muon.
    """

    kind: OptimizerKind = OptimizerKind.ADAMW
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9

    def optimizer(self, parameter: nn.Parameter, *, hidden: bool) -> torch.optim.Optimizer:
        """Return a torch optimizer of one parameter.

        The caller must set the learning rate before each step.

        Args:
            parameter: the parameter.
            hidden: whether the parameter is the weight matrix of a hidden layer.
        """
        decay = self.weight_decay if parameter.ndim > 1 else 0.0
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
            case _:
                return torch.optim.AdamW(
                    [parameter], betas=self.betas, eps=_EPS, weight_decay=decay, fused=True
                )


def update_rule(job: JobSpec) -> UpdateRule:
    """Return the optimizer and the optimizer settings of a job."""
    betas = job.beta1, job.beta2
    return UpdateRule(OptimizerKind(job.optimizer), job.weight_decay, betas, job.momentum)


class Optimizer:
    """Updates all trained parameters of a model, with one torch optimizer per parameter.

    Args:
        model: the model, with fp32 parameters.
        rule: the optimizer and its settings.
        clip: maximum global norm of the gradients; 0 for no clipping.
        scale: the loss scale; None for no loss scaling.
        ranks: the servers that train the model together; None for a single server. Several servers
            sum their gradients before the update, so `in_backward` must be False.
        in_backward: whether to update each parameter during the backward pass, as soon as its
            gradient is complete, and to free the gradient. The result is the same, but only one
            gradient at a time is in memory. With clipping or a loss scale, an additional first
            backward pass computes the global norm and detects overflows.
        files: moves the optimizer state to files; None to keep the state in memory.
        weights: the sharded weights; None if each server holds all weights.

    Attributes:
        applied: True if the current step has already updated some parameters.
        parameters: all trained parameters by name.
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
        self.scale = scale
        self.in_backward = in_backward
        self.applied = False
        self._files = files
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        owners = owners_of(sizes, self._ranks.count)
        self._owners = dict(zip(self.parameters, owners, strict=True))
        if weights is not None:
            self._owners = weights.owners
        self._sums: GradientSums | None = None
        self._found: list[str] = []  # parameters with a gradient on any server
        hidden = _hidden_matrices(model)
        self._optimizers = {
            name: rule.optimizer(parameter, hidden=id(parameter) in hidden)
            for name, parameter in self.parameters.items()
            if self._owners[name] == self._ranks.rank
        }

    def step(self, rate: float, backward: Callable[[], float]) -> float:
        """Run one optimizer step: compute gradients and update the parameters.

        Args:
            rate: the learning rate.
            backward: computes the gradients of the whole batch and returns the loss. With
                `in_backward` and with clipping or a loss scale, `backward` is called twice, and
                must compute the same gradients both times.

        Returns:
            The loss.

        Raises:
            DivergedError: when the loss or the gradients are not finite. No parameter is updated
                then. Exception: with `in_backward` and a single backward pass, parameters whose
                gradients were complete earlier have been updated.
        """
        self._begin(rate)
        if self.in_backward:
            loss = self._step_in_backward(backward)
        else:
            loss = backward()
            self._step(loss)
        self.applied = False
        return loss

    def step_whole(self, rate: float, gradients: Callable[[], float | _T]) -> float | _T:
        """Run one optimizer step with gradients from the fleet, without a local backward pass.

        Args:
            rate: the learning rate.
            gradients: sets the gradients of all parameters and returns the loss. If it returns a
                value that is not a float, no parameter is updated.

        Returns:
            The result of `gradients`.

        Raises:
            DivergedError: when the loss or the gradients are not finite. No parameter is updated.
        """
        self._begin(rate)
        loss = gradients()
        if isinstance(loss, float):
            self._step(loss)
            self.applied = False
        return loss

    def _begin(self, rate: float) -> None:
        self.forget_gradients()
        if self._ranks.count > 1 and self._weights is None:
            self._sums = GradientSums(self._ranks, self.parameters, self._owners)
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = rate

    def begin_passes(self, passes: int) -> None:
        """Begin the passes of a step with sharded weights.

        Args:
            passes: maximum over all servers of the number of passes that a server computes.
        """
        weights = self._weights
        assert weights is not None
        parameters = {name: self.parameters[name] for name in weights.order}
        weights.begin(passes, lambda: GradientSums(self._ranks, parameters, self._owners))

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """Return a context manager for the last backward pass of a step.

        Within the block, each gradient is sent to the server that owns its parameter as soon as the
        gradient is complete. With one server, or with sharded weights, the block has no effect.
        """
        sums = self._sums
        if sums is None:
            yield
            return
        hooks = {name: partial(_completed, sums, name) for name in self.parameters}
        with self._hooked(hooks):
            yield

    @property
    def waited_s(self) -> float:
        """Return the seconds that this server has waited for other servers in the current step."""
        exchanging = self._weights or self._sums
        return exchanging.waited_s if exchanging is not None else 0.0

    def add_up(self) -> None:
        """Sum the gradients over all servers.

        Afterwards, each server holds the gradient sums of the parameters that it owns. Every server
        must call this once per step, even if its own part of the step has failed.
        """
        exchanging = self._weights or self._sums
        assert exchanging is not None
        self._found, self._sums = exchanging.finish(), None

    def forget_gradients(self) -> None:
        """Free the gradients of all trained parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _step(self, loss: float) -> None:
        check_loss(loss)
        if self.scale is not None and not self._unscale(self.scale):
            return
        self._clip()
        for name in self._optimizers:
            self._update(name)
        if self._weights is not None:
            self._weights.updated()
            return
        self._ranks.spread(
            [self.parameters[name].detach() for name in self._found],
            [self._owners[name] for name in self._found],
        )

    def _clip(self) -> None:
        """Clip the global norm of the gradients, as `torch.nn.utils.clip_grad_norm_` does.

        Raises:
            DivergedError: when the norm is not finite. This is checked even without clipping.
        """
        owned = [self.parameters[name] for name in self._optimizers]
        norm = nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None])
        if self._ranks.count > 1:
            parts = self._ranks.agree([norm.item()])
            norm = torch.linalg.vector_norm(torch.tensor(parts))
        check_norm(norm.item())
        if self.clip:
            nn.utils.clip_grads_with_norm_(owned, self.clip, norm)

    def _unscale(self, scale: LossScale) -> bool:
        """Divide all gradients by the loss scale, and update the loss scale.

        Returns:
            True if the gradients of all servers are finite. If False, the step must be skipped.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / scale.factor)
        finite = all(map(is_finite, gradients))
        if all(self._ranks.agree(finite)):
            scale.updated()
            return True
        _overflowed(scale)
        return False

    def _update(self, name: str) -> None:
        """Update one parameter. If `files` are given, move new optimizer state to a file."""
        self.applied = True
        optimizer = self._optimizers[name]
        optimizer.step()
        if self._files is not None:
            self._files.move(optimizer.state[self.parameters[name]])

    def _step_in_backward(self, backward: Callable[[], float]) -> float:
        scale, unscaled = 1.0, 1 / self.scale.factor if self.scale is not None else 1.0
        # True if a first backward pass computes the norm before any parameter is updated.
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

            loss = self._with_hooks(dict.fromkeys(self.parameters, note_norm), backward)
            if self.scale is not None and overflowed:
                _overflowed(self.scale)
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

        loss = self._with_hooks({name: stepping(name) for name in self.parameters}, backward)
        if self.scale is not None:
            self.scale.updated()
        return loss

    def _with_hooks(
        self, hooks: Mapping[str, Callable[[Tensor], None]], backward: Callable[[], float]
    ) -> float:
        with self._hooked(hooks):
            return backward()

    @contextmanager
    def _hooked(self, hooks: Mapping[str, Callable[[Tensor], None]]) -> Iterator[None]:
        """Return a context manager that calls a hook when a parameter's gradient is complete.

        Args:
            hooks: functions by parameter name. A function is called with its parameter.
        """
        handles = [
            self.parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for name, hook in hooks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- checkpoints ---

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this server's optimizer state, keyed by name in a checkpoint.

        The result is empty before the first step.
        """
        state = {}
        for name, optimizer in self._optimizers.items():
            for key, value in optimizer.state.get(self.parameters[name], {}).items():
                if isinstance(value, Tensor):
                    state[f"{_STATE}{key}.{name}"] = value
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this server's optimizer state from a checkpoint.

        Args:
            tensors: all tensors of the checkpoint by name.

        Raises:
            CleaveError: when the checkpoint lacks the optimizer state of a parameter.
        """
        held: dict[str, dict[str, Tensor]] = {}
        for full, value in tensors.items():
            if full.startswith(_STATE):
                key, _, name = full.removeprefix(_STATE).partition(".")
                held.setdefault(name, {})[key] = value
        for name, optimizer in self._optimizers.items():
            if name not in held:
                raise CleaveError(
                    f"the checkpoint has no optimizer state of {name!r}; it is not of this model, "
                    f"or was not written by cleave"
                )
            # Copy the values, because they may be mapped to the checkpoint's file.
            state: dict[str, Any] = {key: value.clone() for key, value in held[name].items()}
            if self._files is not None:
                self._files.move(state)
            optimizer.state[self.parameters[name]] = state


def _overflowed(scale: LossScale) -> None:
    """Halve the loss scale after a step whose gradients overflow in fp16.

    Raises:
        DivergedError: when the loss scale is too small to be the cause of the overflow.
    """
    scale.overflowed()
    if scale.exhausted:
        raise DivergedError(f"its gradients overflow in fp16 with a loss scale of {scale.factor:g}")


def _completed(sums: GradientSums, name: str, parameter: Tensor) -> None:
    """Tell `sums` that a parameter's gradient is complete; registered as the parameter's hook."""
    sums.complete(name)


def _hidden_matrices(model: Any) -> set[int]:
    """Return the `id` of each weight matrix of a hidden linear layer.

    The weights of the LM head and of the input embedding are excluded. So are 2-D parameters
    outside linear layers, such as those of state space models.
    """
    found = {id(m.weight) for m in model.modules() if is_linear(m) and m.weight.ndim == _MATRIX}
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        if module is not None:
            found -= {id(parameter) for parameter in module.parameters()}
    return found
