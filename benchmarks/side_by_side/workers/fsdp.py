"""One process of FSDP2 (`fully_shard`) over gloo; the environment is that of `workers.ddp`.

In bf16, weights are gathered and used, and their gradients reduced, as bf16; the shards stay fp32.
Weights stay gathered from a layer's forward pass to its backward pass. With the variant `reshard`
they are freed in between and gathered again, to save memory. gloo has no native reduce-scatter and
sums all gradients everywhere, so a step moves 1.5 times the bytes of DDP.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common import make_trainer
from benchmarks.side_by_side.workers.parts import layers_of
from benchmarks.side_by_side.workers.replicas import train
from benchmarks.side_by_side.workers.worker import read_options
from cleave.training.loop.optimizer import Optimizer, update_rule


def sharded(model: nn.Module, *, dtype: str, reshard: bool) -> nn.Module:
    """Shard each layer, and then the rest of the model, across all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    narrow = torch.bfloat16 if dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    for part in (*layers_of(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return model


def main() -> None:
    """Train; see the module's docstring."""
    options = read_options(__doc__, int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    trainer = make_trainer(options.job, None)
    job = options.job
    model = sharded(trainer.model, dtype=job.dtype, reshard=options.variant == "reshard")
    # Sharding has replaced the model's parameters.
    trainer.optimizer = Optimizer(model, update_rule(job), clip=job.clip, in_backward=False)
    train(trainer)


if __name__ == "__main__":
    main()
