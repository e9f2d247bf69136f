"""`cloud`: one or eight data-centre GPUs in one machine.

compute   train_flops / (GPUs x utilisation x peak); 4/3 of that if activations are recomputed;
          the bf16 and fp16 peak; for fp32 the TF32 peak, which is half
between   fully sharded: weights gathered twice, gradients scattered once, overlapped with compute;
          3 (G - 1)/G 2P bytes for each GPU over its NVLink (Rajbhandari et al., ZeRO, section 7)
offload   if 16 bytes per parameter do not fit: optimizer and its states on the host (Ren et
          al., ZeRO-Offload, arXiv 2101.06840, section 4): 2P bytes of gradients to the host,
          2P of updated weights back; the host's Adam reads and writes 28 bytes per parameter.
          Weights that do not fit either are streamed twice more, overlapped with compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from simulator.method import Conditions, Outcome, Part
from simulator.work import STATE_BYTES, layer_work, train_flops

_ADAM_BYTES: Final = 28  # master weight and moments read and written (24), gradient and weight (4)
_WORKING_LAYERS: Final = 2  # layers whose weights are on the GPU while weights are streamed


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data-centre GPU with its datasheet figures; bytes/s are one-way.

    Attributes:
        flops_per_s: dense bf16 peak.
        host_bytes_per_s: rate of the host link in common benchmarks (80 % of the bus).
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
    """GPUs in one machine.

    Attributes:
        gpus: number of GPUs.
        utilisation: share of the peak that training reaches.
        host_memory_bytes, host_bytes_per_s: the host's memory and memory bandwidth for offloading,
            shared by all GPUs.
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
        """Return a row with everything on the GPUs and, if it does not fit, one with offloading."""
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
        # The smallest micro-batch is one sample; gradients accumulate.
        kept = layers * layer.kept_bytes
        recomputed = layers * layer.boundary_bytes + layer.kept_bytes
        recompute = state + recomputed <= memory < state + kept
        needed = state + (kept if state + kept <= memory else min(recomputed, kept))
        peak = self.gpu.flops_per_s * min(1.0, 2 / conditions.element.sent)
        flops = train_flops(spec, conditions.batch, conditions.seq)
        compute_s = flops / (gpus * self.utilisation * peak)
        recompute_s = compute_s / 3 if recompute else 0.0
        crossing_s = 3 * (gpus - 1) / gpus * weights / self.gpu.nvlink_bytes_per_s
        crossings = 3 if streamed else 1  # gradients; and weights twice
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
    return f"{what} needs {needed / 1e9:.3g} GB and has {offered / 1e9:.3g} GB"
