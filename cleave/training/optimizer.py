"""AdamW with warm-up, cosine decay and clipping, applied after or in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cleave.errors import CleaveError

_BETAS = (0.9, 0.95)  # OPT, arXiv 2205.01068, section 2.2
_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate with linear warm-up, then cosine decay to a tenth of the peak.

    Attributes:
        peak: the largest learning rate.
        warmup_steps: steps until the peak is reached.
        steps: steps in total.
    """

    peak: float
    warmup_steps: int
    steps: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / span)
        return self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


class Optimizer:
    """AdamW for all parameters of a model, with one torch optimizer for each.

    Args:
        model: the model, with fp32 parameters.
        weight_decay: weight decay, applied to matrices only.
        clip: largest norm of all gradients together; 0 for none.
        in_backward: whether to update each parameter in the backward pass, as soon as its gradient
            is complete, and free the gradient. The update is the same, with memory for one gradient
            at a time. With clipping the norm is needed first, so the pass is done twice.

    Attributes:
        applied: whether the step under way has updated some parameters already.
    """

    def __init__(
        self, model: nn.Module, *, weight_decay: float, clip: float, in_backward: bool
    ) -> None:
        self.clip = clip
        self.in_backward = in_backward
        self.applied = False
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizers = {
            name: torch.optim.AdamW(
                [parameter],
                betas=_BETAS,
                eps=_EPS,
                weight_decay=weight_decay if parameter.ndim > 1 else 0.0,
                fused=True,
            )
            for name, parameter in self.parameters.items()
        }

    def step(self, rate: float, backward: Callable[[], float]) -> float:
        """Do one update.

        Args:
            rate: the learning rate.
            backward: computes gradients of the whole batch and returns the loss. It is called twice
                when updating in the backward pass with clipping, and must then do the same both
                times.

        Returns:
            What `backward` returned.
        """
        self._begin(rate)
        if self.in_backward:
            loss = self._step_in_backward(backward)
        else:
            loss = backward()
            self._step()
        self.applied = False
        return loss

    def step_whole(self, rate: float, gradients: Callable[[], float | None]) -> float | None:
        """Do one update with gradients that do not come from a backward pass here.

        Args:
            rate: the learning rate.
            gradients: sets the gradients of all parameters and returns the loss; or sets none and
                returns None, and nothing is updated.

        Returns:
            What `gradients` returned.
        """
        self._begin(rate)
        loss = gradients()
        if loss is not None:
            self._step()
            self.applied = False
        return loss

    def _begin(self, rate: float) -> None:
        self.forget_gradients()
        for optimizer in self._optimizers.values():
            optimizer.param_groups[0]["lr"] = rate

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _step(self) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.applied = True
        for optimizer in self._optimizers.values():
            optimizer.step()

    def _step_in_backward(self, backward: Callable[[], float]) -> float:
        scale = 1.0
        if self.clip:
            squares: list[Tensor] = []

            def note_norm(parameter: Tensor) -> None:
                assert parameter.grad is not None
                squares.append(torch.linalg.vector_norm(parameter.grad))
                parameter.grad = None

            random = torch.get_rng_state()
            self._with_hooks(dict.fromkeys(self.parameters, note_norm), backward)
            torch.set_rng_state(random)
            norm = torch.linalg.vector_norm(torch.stack(squares)).item()
            # As in torch.nn.utils.clip_grad_norm_.
            scale = min(1.0, self.clip / (norm + 1e-6)) if math.isfinite(norm) else math.nan

        def stepping(name: str) -> Callable[[Tensor], None]:
            def step(parameter: Tensor) -> None:
                assert parameter.grad is not None
                if self.clip and scale != 1.0:
                    parameter.grad.mul_(scale)
                self.applied = True
                self._optimizers[name].step()
                parameter.grad = None

            return step

        return self._with_hooks({name: stepping(name) for name in self.parameters}, backward)

    def _with_hooks(
        self, hooks: Mapping[str, Callable[[Tensor], None]], backward: Callable[[], float]
    ) -> float:
        handles = [
            self.parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for name, hook in hooks.items()
        ]
        try:
            return backward()
        finally:
            for handle in handles:
                handle.remove()

    # --- checkpoints ---

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs, by name; empty before the first step."""
        state = {}
        for name, optimizer in self._optimizers.items():
            for key, value in optimizer.state.get(self.parameters[name], {}).items():
                state[f"optimizer.{key}.{name}"] = value
        return state

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state of a checkpoint.

        Raises:
            CleaveError: when it lacks a parameter's state.
        """
        for name, optimizer in self._optimizers.items():
            parameter = self.parameters[name]
            state = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors.get(f"optimizer.{key}.{name}")
                if value is None:
                    raise CleaveError(
                        f"the checkpoint has no optimizer state {key!r} of {name!r}; "
                        f"it is not of this model, or was not written by cleave"
                    )
                state[key] = value.clone()  # it may lie in the checkpoint's file
            optimizer.state[parameter] = state
