"""One process of `torch.distributed.pipelining` over gloo; its environment is `workers.ddp`'s.

A sequence is a micro-batch. If weights are trained and the head is tied to the embedding (OPT-125M,
SmolLM2), stages form a V: the first rank has the first and the last of eight stages, so it holds
both uses of the tied weight; the schedule is `ScheduleZBVZeroBubble`. With frozen weights or an
untied head, four stages are enough (`Schedule1F1B`) and send fewer activations. The variants `v`,
`1f1b` and `gpipe` select a schedule. With `1f1b` and `gpipe`, the first and the last rank sum their
gradients of a tied weight in every step. In bf16, multiplications are autocast, and activations and
their gradients are sent as bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)

from benchmarks.common import make_trainer
from benchmarks.side_by_side.workers.parts import StageModule, in_line, in_v
from benchmarks.side_by_side.workers.worker import read_options, tell, timed
from cleave.training.loop.optimizer import Optimizer, update_rule
from cleave.training.loop.trainer import Trainer
from cleave.workload.build import resolve_model
from cleave.workload.registry import ModelSpec


class BoundaryCast(nn.Module):
    """A stage that computes in autocast bf16, and exchanges bf16 with other stages."""

    def __init__(self, stage: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.stage = stage
        self._last = last

    def forward(self, x: Tensor) -> Tensor:
        """Return the stage's output."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = self.stage(x.float() if x.is_floating_point() else x)
        return y if self._last else y.to(torch.bfloat16)


def head_layers(spec: ModelSpec) -> float:
    """Return the work of the head in layers, by number of weights."""
    layer = spec.width * (2 * spec.query_width + 2 * spec.kv_width)
    layer += (3 if spec.family.value == "llama" else 2) * spec.width * spec.ffn_width
    return spec.vocabulary * spec.embedding_width / layer


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Pipeline:
    """This rank's part of a pipeline, and its steps.

    Args:
        trainer: trainer with the whole model, the job and its batches. Other parts of the model
            are freed.
        spec: sizes of the model.
        variant: variant of the method; empty for the default.
    """

    def __init__(self, trainer: Trainer, spec: ModelSpec, variant: str) -> None:
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._job, self._loader, self._rates = trainer.job, trainer.loader, trainer.schedule
        model: Any = trainer.model
        embedding = model.get_input_embeddings()
        tied = embedding.weight.requires_grad and spec.tied_head
        kind = variant or ("v" if tied else "1f1b")
        v = kind == "v"
        count = 2 * ranks if v else ranks
        mine = [self._rank, count - 1 - self._rank] if v else [self._rank]
        self._has_last = count - 1 in mine
        self._tied = embedding.weight if tied and not v and self._rank in (0, ranks - 1) else None
        self._ends = dist.new_group([0, ranks - 1]) if tied and not v else None
        cuts = (in_v if v else in_line)(spec.layers, head_layers(spec), ranks)
        modules = [self._module(model, cuts, index, self._job.dtype) for index in mine]
        stages: list[Any] = [
            PipelineStage(module, index, count, torch.device("cpu"))
            for module, index in zip(modules, mine, strict=True)
        ]
        batch = self._job.batch
        schedules: dict[str, Callable[[], Any]] = {
            "v": lambda: ScheduleZBVZeroBubble(stages, batch, loss_fn=loss_of, scale_grads=False),
            "1f1b": lambda: Schedule1F1B(stages[0], batch, loss_fn=loss_of, scale_grads=False),
            "gpipe": lambda: ScheduleGPipe(stages[0], batch, loss_fn=loss_of, scale_grads=False),
        }
        self._schedule = schedules[kind]()
        held = nn.ModuleList(modules)
        self._optimizer = Optimizer(held, update_rule(self._job), clip=0.0, in_backward=False)
        self._step = 0
        sizes = "+".join(str(len(part)) for part in cuts)
        self.told = f"{type(self._schedule).__name__}, {batch} micro-batches, layers {sizes}"

    @staticmethod
    def _module(model: nn.Module, cuts: list[range], index: int, dtype: str) -> nn.Module:
        last = index == len(cuts) - 1
        stage = StageModule(model, cuts[index], first=index == 0, last=last)
        return BoundaryCast(stage, last=last) if dtype == "bf16" else stage

    def step(self) -> float:
        """Run a step; return its loss on the rank with the last stage, 0 elsewhere."""
        rate = self._rates.rate(self._step)
        self._step += 1
        return self._optimizer.step(rate, self._gradients)

    def _gradients(self) -> float:
        ids, labels, _ = self._loader.next_batch()
        losses: list[Tensor] = []
        given = (ids,) if self._rank == 0 else ()
        if self._has_last:
            self._schedule.step(*given, target=labels, losses=losses)
        else:
            self._schedule.step(*given)
        self._clip()
        return float(torch.stack(losses).mean()) if losses else 0.0

    def _clip(self) -> None:
        """Divide gradients for the mean loss, and clip them by the norm of the whole model."""
        if self._tied is not None:
            assert self._tied.grad is not None
            dist.all_reduce(self._tied.grad, group=self._ends)
        held = [p for p in self._optimizer.parameters.values() if p.grad is not None]
        # The schedule would divide a weight of two stages twice.
        for gradient in (p.grad for p in held if p.grad is not None):
            gradient.div_(self._job.batch)
        # A weight on two ranks counts once.
        counted = [p for p in held if not (p is self._tied and self._rank)]
        squares = nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None]) ** 2
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(held, self._job.clip, squares.sqrt())


def main() -> None:
    """Train; see the module's docstring."""
    options = read_options(__doc__, 1)
    dist.init_process_group("gloo")
    trainer = make_trainer(options.job, None)
    pipeline = Pipeline(trainer, resolve_model(options.job.model).spec, options.variant)
    del trainer  # frees the parameters of other stages
    if dist.get_rank() == 0:
        print(json.dumps({"event": "best", "best": pipeline.told}), flush=True)
    dist.barrier()
    for step in range(options.job.steps):
        loss, wall_s = timed(pipeline.step)
        told = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(told)  # others have 0
        if dist.get_rank() == 0:
            tell(step + 1, float(told), wall_s)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
