"""One peer of hivemind. Runs in a separate environment that has hivemind.

The batch is split as in DDP. In a step, a peer computes the gradients of its part, reports the
samples, waits until all peers have reported, and lets `hivemind.Optimizer.step` average the
gradients and update. A peer that waits too long computes and reports another part, as hivemind's
loops do, so the others continue if one is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

import hivemind
import hivemind.compression
import torch
from hivemind.optim.grad_averager import GradientAverager
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.common import make_trainer
from benchmarks.side_by_side.contenders.hivemind import averaging_s, loss_file
from benchmarks.side_by_side.workers.worker import PartLoader, read_options, tell
from cleave.training.data.batches import Batch
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer

_LOOK_S: Final = 0.05
_PATIENCE: Final = 3.0  # multiple of the seconds of this peer's own part
_LEAST_PATIENCE_S: Final = 20.0
_ANSWER_S: Final = 30.0
"""Timeout of the DHT. Its answers wait behind gradients on the links, and a peer that misses the
timeout (3 s by default) is dropped for good."""

_NEVER: Final = 10**9
_COMPRESSIONS: Final[dict[str, Any]] = {
    "": hivemind.compression.NoCompression,
    "fp16": hivemind.compression.Float16Compression,
    "8bit": hivemind.compression.Uniform8BitQuantization,
}


class ClippedAdamW(torch.optim.AdamW):
    """AdamW with gradient clipping by norm.

    Args:
        groups: parameter groups.
        clip: maximum norm of all gradients together.
    """

    def __init__(self, groups: Any, clip: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self._clip = clip

    def begin(self) -> None:
        """Create the optimizer's state; otherwise hivemind would run a step to create it."""
        for parameter in self._held():
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _held(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Any = None) -> Any:
        """Clip the gradients and update the parameters."""
        nn.utils.clip_grad_norm_(self._held(), self._clip)
        return super().step(closure)


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return trained parameters in two groups: matrices, with weight decay, and the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _made(job: JobSpec, groups: Any) -> ClippedAdamW:
    """Return a job's optimizer; the schedule sets its learning rate."""
    betas = job.beta1, job.beta2
    made = ClippedAdamW(groups, job.clip, lr=1.0, betas=betas, eps=1e-8, fused=True)
    made.begin()
    return made


def meet(arguments: argparse.Namespace) -> Any:
    """Return a DHT that all peers share; the first peer writes its addresses to a file."""
    found = arguments.meeting / "peers.json"
    known: list[str] = []
    while arguments.worker and not known:
        if found.exists():
            known = json.loads(found.read_text())
        else:
            time.sleep(_LOOK_S)
    dht = hivemind.DHT(
        initial_peers=known,
        host_maddrs=[arguments.here],
        start=True,
        use_ipfs=False,
        wait_timeout=_ANSWER_S,
        blacklist_time=0,
    )
    if not arguments.worker:
        written = found.with_suffix(".new")
        written.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        written.rename(found)
    return dht


class Peer:
    """This peer's steps.

    Args:
        trainer: trainer with the model, the job and its batches.
        dht: DHT shared with the other peers.
        compression: compression of gradients.
        arguments: parsed command line.
    """

    def __init__(
        self, trainer: Trainer, dht: Any, compression: Any, arguments: argparse.Namespace
    ) -> None:
        job = trainer.job
        self._trainer = trainer
        self._part = job.batch // arguments.workers
        self._target = job.batch
        groups = groups_of(trainer.model, job.weight_decay)
        trained = sum(p.numel() for group in groups for p in group["params"])
        timeout_s = averaging_s(trained, arguments.workers, arguments.bytes_per_s)
        self.optimizer: Any = hivemind.Optimizer(
            dht=dht,
            run_id="side-by-side",
            target_batch_size=job.batch,
            batch_size_per_step=self._part,
            params=groups,
            optimizer=partial(_made, job),
            scheduler=lambda optimizer: LambdaLR(optimizer, trainer.schedule.rate),
            offload_optimizer=False,
            reuse_grad_buffers=True,
            averager_opts={"reuse_tensors": True},  # no copies: state is not averaged
            average_state_every=_NEVER,
            matchmaking_time=15.0,
            grad_averager_factory=partial(
                GradientAverager, target_group_size=arguments.workers, request_timeout=5.0
            ),
            averaging_timeout=timeout_s,
            next_chunk_timeout=60.0,
            grad_compression=compression(),
            tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0},
            verbose=True,
        )

    def step(self) -> float:
        """Compute and average until an update is done; return the loss of the first part."""
        epoch = self.optimizer.local_epoch
        first: float | None = None
        samples = 0
        while self.optimizer.local_epoch == epoch:
            began_s = time.monotonic()
            loss = self._gradients(self._trainer.loader.next_batch())
            first = loss if first is None else first
            samples += self._part
            self._wait_for_others(epoch, samples, time.monotonic() - began_s)
            self.optimizer.step(batch_size=self._part)
        assert first is not None
        return first

    def _gradients(self, batch: Batch) -> float:
        """Accumulate the gradients of a part, one sequence at a time; return its loss.

        With the logits of all sequences at once, four peers would not fit into 24 GB.
        """
        total = 0.0
        for row in range(self._part):
            one = Batch(batch.ids[row : row + 1], batch.labels[row : row + 1])
            loss = self._trainer._loss(one) / self._part
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def _wait_for_others(self, epoch: int, samples: int, computed_s: float) -> None:
        tracker = self.optimizer.tracker
        tracker.report_local_progress(epoch, samples)
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * computed_s)
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s:
            progress = tracker.global_progress
            if progress.epoch > epoch or progress.samples_accumulated >= self._target:
                return
            time.sleep(_LOOK_S)


def main() -> None:
    """Train; see the module's docstring."""
    own = argparse.ArgumentParser(description=__doc__)
    own.add_argument("--worker", type=int, required=True)
    own.add_argument("--workers", type=int, required=True)
    own.add_argument("--here", required=True, help="where this peer listens, as a multiaddress")
    own.add_argument("--bytes-per-s", type=float, required=True)
    own.add_argument("--meeting", type=Path, required=True, help="a folder that all peers see")
    arguments, rest = own.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    options = read_options(__doc__, arguments.workers)
    trainer = make_trainer(options.job, None)
    trainer.loader = PartLoader(trainer.loader, options.job, arguments.worker, arguments.workers)
    dht = meet(arguments)
    peer = Peer(trainer, dht, _COMPRESSIONS[options.variant], arguments)
    for step in range(options.job.steps):
        began_s = time.perf_counter()
        loss = peer.step()
        wall_s = time.perf_counter() - began_s
        # All peers write their losses to the folder without waiting for others.
        (arguments.meeting / loss_file(step, arguments.worker)).write_text(repr(loss))
        if not arguments.worker:
            tell(step + 1, loss, wall_s)
    signal.pause()  # stay until ended, because peers need one another to the end


if __name__ == "__main__":
    main()
