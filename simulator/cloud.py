"""`cloud`: one or eight data-centre GPUs in one machine.

For G GPUs and P parameters of e bytes each (2 in bf16 and fp16, 4 in fp32):

compute   train_flops / (G x utilisation x peak), times 4/3 if activations are recomputed.
          In bf16 and fp16, the peak is the dense bf16 peak. In fp32, it is the TF32 peak, which is
          half as high.
between   Parameters are fully sharded. Each step gathers the weights twice and reduce-scatters the
GPUs      gradients once, overlapped with compute. Each GPU sends 3 (G - 1)/G e P bytes over its
          NVLink (Rajbhandari et al., ZeRO, section 7).
offload   If the state (16 bytes per parameter) and the activations do not fit in GPU memory, the
          optimizer and its state are on the host (Ren et al., ZeRO-Offload, arXiv 2101.06840,
          section 4). e P bytes of gradients are copied to the host, and e P bytes of weights back.
          The host's Adam reads and writes 28 bytes per parameter. If the weights exceed half of the
          GPU memory, each step copies them from the host twice more, overlapped with compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulator.method import Conditions, Outcome, Part
from simulator.work import STATE_BYTES, layer_work, train_flops

# Adam reads and writes master weight and moments (24 bytes), reads the gradient (2), and writes the
# weight (2).
_ADAM_BYTES: Final = 28
_WORKING_LAYERS: Final = 2  # number of layers on the GPU at a time if weights are streamed


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Its figures are from the datasheet unless stated otherwise.

    Attributes:
        flops_per_s: peak FLOP/s in bf16 without sparsity.
        nvlink_bytes_per_s: NVLink rate in each direction.
        host_bytes_per_s: measured rate between host and GPU in each direction (80 % of PCIe).
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    nvlink_bytes_per_s: float
    host_bytes_per_s: float


A100: Final = Gpu("a100", 312e12, 80e9, 300e9, 25e9)  # SXM 80 GB, PCIe 4.0 x16
H100: Final = Gpu("h100", 989e12, 80e9, 450e9, 50e9)  # SXM 80 GB, PCIe 5.0 x16


@dataclass(frozen=True, slots=True)
class Cloud:
    """Training on a single machine with data-centre GPUs.

    Attributes:
        utilisation: share of the GPUs' peak FLOP/s that training reaches.
        host_memory_bytes, host_bytes_per_s: memory and memory bandwidth of the host, which all GPUs
            share for offloading.
    """

    gpu: Gpu
    gpus: int
    utilisation: float = 0.5
    host_memory_bytes: float = 2e12
    host_bytes_per_s: float = 200e9

    @property
    def name(self) -> str:
        return f"cloud-{self.gpus}x{self.gpu.name}"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return an outcome without offloading.

        If memory is too small, also return one with offloading.
        """
        resident = self._outcome(conditions, offload=False)
        return [resident] if resident.fits else [resident, self._outcome(conditions, offload=True)]

    def _outcome(self, conditions: Conditions, *, offload: bool) -> Outcome:
        spec, gpus, memory = conditions.spec, self.gpus, self.gpu.memory_bytes
        layer = layer_work(spec, conditions.seq, conditions.element.sent)
        parameters, layers = spec.parameters, spec.layers
        weights = conditions.element.sent * parameters
        streamed = offload and weights / gpus > memory / 2
        if not offload:
            state = STATE_BYTES * parameters / gpus
        elif streamed:
            state = _WORKING_LAYERS * 2 * layer.parameters * conditions.element.sent
        else:
            state = weights / gpus + layer.parameters * conditions.element.sent
        # Gradients accumulate over micro-batches, so only one sample at a time is in memory.
        kept = layers * layer.kept_bytes
        recomputed = layers * layer.boundary_bytes + layer.kept_bytes
        recompute = state + recomputed <= memory < state + kept
        needed = state + (kept if state + kept <= memory else min(recomputed, kept))
        peak = self.gpu.flops_per_s * min(1.0, 2 / conditions.element.sent)
        flops = train_flops(spec, conditions.batch, conditions.seq)
        compute_s = flops / (gpus * self.utilisation * peak)
        recompute_s = compute_s / 3 if recompute else 0.0
        crossing_s = 3 * (gpus - 1) / gpus * weights / self.gpu.nvlink_bytes_per_s
        crossings = 3 if streamed else 1  # gradients once, and streamed weights twice
        crossing_s += crossings * weights / gpus / self.gpu.host_bytes_per_s if offload else 0.0
        parts = [
            Part("compute", compute_s),
            Part("recompute", recompute_s),
            Part("links not hidden", max(0.0, crossing_s - compute_s - recompute_s)),
        ]
        host = (STATE_BYTES - 2) * parameters
        misfit = "" if needed <= memory else _too_big(self.name, needed, memory)
        if offload:
            parts.append(Part("weights back", weights / gpus / self.gpu.host_bytes_per_s))
            parts.append(Part("host's Adam", _ADAM_BYTES * parameters / self.host_bytes_per_s))
            if host > self.host_memory_bytes:
                misfit = _too_big("the host", host, self.host_memory_bytes)
                needed, memory = host, self.host_memory_bytes
        return Outcome(
            method=f"{self.name} (offload)" if offload else self.name,
            setting=f"{self.utilisation:.0%} of peak{', recompute' if recompute else ''}",
            devices_used=gpus,
            parts=tuple(parts),
            download_bytes=0.0,
            upload_bytes=0.0,
            memory_offered_bytes=memory,
            memory_needed_bytes=needed,
            misfit=misfit,
            flops=flops * (4 / 3 if recompute else 1),
        )


def _too_big(what: str, needed: float, offered: float) -> str:
    return f"{what} needs {needed / 1e9:.3g} GB, but has only {offered / 1e9:.3g} GB"
