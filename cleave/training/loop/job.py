"""The specification of a training job: all settings that decide what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, Final, Self

from cleave.errors import UsageError
from cleave.planner.plan import Method
from cleave.training.loop.interval import DEFAULT, Interval
from cleave.training.loop.schedule import Decay
from cleave.training.lora.spec import LoraSpec
from cleave.workload.registry import ModelSpec


class Precision(Enum):
    """The dtype of matrix products. Weights and optimizer state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class MemoryMode(Enum):
    """How the PS's memory is used.

    PLAIN keeps activations and all gradients. RECOMPUTE recomputes activations in the backward
    pass. LEAN also updates each parameter as soon as its gradient is complete; with clipping it
    needs an extra pass for the norm. SHARDED, for several servers, is RECOMPUTE with the weights
    split among the servers. AUTO picks the fastest mode that fits.
    """

    AUTO = "auto"
    PLAIN = "plain"
    RECOMPUTE = "recompute"
    LEAN = "lean"
    SHARDED = "sharded"


class OffloadMode(Enum):
    """Which matrix products go to the fleet.

    ALL sends every product. AUTO keeps on the PS those that it is predicted to finish faster.
    """

    ALL = "all"
    AUTO = "auto"


class FallbackMode(Enum):
    """What happens while no device is connected.

    WAIT pauses training until a device connects. LOCAL multiplies on the PS until then.
    """

    WAIT = "wait"
    LOCAL = "local"


class Packing(Enum):
    """How documents share a sequence.

    JOINED lets tokens attend to earlier documents. SEPARATE does not, restarts positions with each
    document, and does not learn a document's first token.
    """

    JOINED = "joined"
    SEPARATE = "separate"


class OptimizerKind(Enum):
    """The optimizer; the values are those of `--optimizer`."""

    ADAMW = "adamw"
    SGD = "sgd"
    """With momentum."""

    ADAFACTOR = "adafactor"
    """Factors the second moments of a matrix by row and column (arXiv 1804.04235)."""

    MUON = "muon"
    """torch's `Muon` at AdamW's learning rate for hidden layers' matrices; AdamW for the rest."""


MAY_CHANGE: Final = (
    "steps", "eval_every", "eval_batches", "checkpoint_every", "save_total_limit", "keep_best",
    "early_stop", "report_to", "memory", "state_dir", "method", "audit",
    "offload", "journal", "fallback", "fallback_after_s", "against",
)  # fmt: skip
"""Settings that a resumed run may change."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to train and how.

    Attributes:
        model: a name of the registry, or a local Hugging Face folder.
        data: a text, JSONL or Parquet file, a folder, or a `datasets` name; empty for the default
            corpus.
        steps: optimizer steps in total, including a resumed run's earlier ones.
        batch, seq: sequences per micro-batch, tokens per sequence.
        packing: see `Packing`.
        accumulate: micro-batches per step.
        dtype: see `Precision`; `fp16` scales the loss (`cleave.training.loop.loss_scale`).
        learning_rate: peak learning rate; 0 for the published rate, or the adapters' default.
        warmup_steps: steps of linear warm-up; -1 for a tenth of the run, 100 at most.
        schedule: see `cleave.training.loop.schedule.Decay`.
        floor: final learning rate as a share of the peak.
        decay_steps: decay steps of the WSD schedule; -1 for a tenth of the run.
        lora: adapters for frozen weights, as `LoraSpec.of` reads them; empty to train all weights.
        optimizer: see `OptimizerKind`.
        beta1, beta2: decay rates of AdamW's moments.
        momentum: momentum of SGD and Muon.
        weight_decay: weight decay of matrices.
        clip: largest gradient norm; 0 for no clipping.
        seed: seed of weights and data order.
        eval_data: source of held-out text, like `data`; empty for a part of `data`.
        eval_every, eval_batches: steps between held-out losses (0: never), and batches in each.
        checkpoint_every: steps or time between checkpoints, as `Interval.of` reads them; the end
            of the run adds one. 0 for no checkpoints.
        save_total_limit: number of latest checkpoints to keep.
        keep_best: whether to keep the checkpoint with the lowest held-out loss as well.
        early_stop: stop after this many held-out losses without a new lowest; 0 for never.
        report_to: other trackers of the run's curves, see `cleave.training.loop.trackers`.
        memory: see `MemoryMode`.
        state_dir: a folder whose files hold the optimizer's state; empty to keep it in memory.
        method: see `cleave.planner.plan.Method`.
        audit: probability that the PS audits a device's part of a step by stages.
        offload: see `OffloadMode`; applies to tiles only.
        journal: whether to keep finished products on disk (`cleave.training.loop.journal`).
        fallback: see `FallbackMode`.
        fallback_after_s: seconds without any device after which `local` begins.
        against: a run folder whose losses are shown next to this run's; empty for none.
    """

    model: str
    data: str = ""
    steps: int = 100
    batch: int = 4
    seq: int = 128
    packing: str = "joined"
    accumulate: int = 1
    dtype: str = "fp32"
    learning_rate: float = 0.0
    warmup_steps: int = -1
    schedule: str = "cosine"
    floor: float = 0.1
    decay_steps: int = -1
    lora: str = ""
    optimizer: str = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.9
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_data: str = ""
    eval_every: int = 0
    eval_batches: int = 8
    checkpoint_every: int | str = DEFAULT
    save_total_limit: int = 2
    keep_best: bool = False
    early_stop: int = 0
    report_to: str = ""
    memory: str = "auto"
    state_dir: str = ""
    method: str = "auto"
    audit: float = 0.05
    offload: str = "all"
    journal: bool = False
    fallback: str = "wait"
    fallback_after_s: float = 30.0
    against: str = ""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, str) and value != value.encode("utf-8", "replace").decode():
                raise UsageError(
                    f"--{_flag(name)} is {value!r}, which is not UTF-8; rename the file or folder"
                )
        for name in ("steps", "batch", "seq", "accumulate", "eval_batches", "save_total_limit"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{_flag(name)} is {getattr(self, name)}; give 1 or more")
        for name in ("learning_rate", "weight_decay", "clip", "eval_every", "early_stop"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{_flag(name)} is {getattr(self, name)}; give 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"--{name} is {getattr(self, name)}; give a number from 0 to below 1"
                )
        if not 0 <= self.floor <= 1:
            raise UsageError(f"--floor is {self.floor}; give a share of the peak, from 0 to 1")
        if self.optimizer == OptimizerKind.SGD.value and not self.learning_rate:
            raise UsageError(
                "--optimizer sgd needs --learning-rate: published rates are those of AdamW"
            )
        if not 0 <= self.audit <= 1:
            raise UsageError(f"--audit is {self.audit}; give a chance, from 0 to 1")
        Interval.of(self.checkpoint_every)
        self._check_adapters()
        if not 0 <= self.fallback_after_s < float("inf"):
            raise UsageError(
                f"--fallback-after is {self.fallback_after_s}; give seconds, 0 or more"
            )
        for name in ("eval_data", "keep_best", "early_stop"):
            if getattr(self, name) and not self.eval_every:
                raise UsageError(
                    f"--{_flag(name)} is of use with held-out losses; give --eval-every as well"
                )
        if self.journal and not self.interval:
            raise UsageError(
                "--journal keeps what was done since the last checkpoint, and --checkpoint-every 0 "
                "makes none; give it a number of steps or a time"
            )
        if self.dtype == Precision.FP16.value and self.method == Method.STAGES.value:
            raise UsageError(
                "--dtype is 'fp16', and stages travel in bf16 or fp32; give one of these, or "
                "--method tiles"
            )
        if self.journal and self.method == Method.STAGES.value:
            raise UsageError("--journal keeps products of tiles; leave it out with --method stages")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; give a number from 0 to 2**63 - 1")
        for name, kind in (
            ("packing", Packing),
            ("dtype", Precision),
            ("memory", MemoryMode),
            ("method", Method),
            ("schedule", Decay),
            ("optimizer", OptimizerKind),
            ("offload", OffloadMode),
            ("fallback", FallbackMode),
        ):
            values = [member.value for member in kind]
            if getattr(self, name) not in values:
                raise UsageError(
                    f"--{name} is {getattr(self, name)!r}; use one of {', '.join(values)}"
                )

    def _check_adapters(self) -> None:
        if self.lora and LoraSpec.of(self.lora).bits and self.journal:
            raise UsageError(
                f"--lora is {self.lora!r}, and --journal keeps products of tiles, which take no "
                "quantized weights; leave out --journal, or bits"
            )
        if self.lora and LoraSpec.of(self.lora).bits and self.method == Method.TILES.value:
            raise UsageError(
                f"--lora is {self.lora!r}, and tiles take no quantized weights; give --method "
                "stages, auto or local, or leave bits out"
            )
        if self.lora and LoraSpec.of(self.lora).dropout and self.method == Method.STAGES.value:
            raise UsageError(
                "--lora has dropout, which stages cannot have: their passes are done twice and "
                "must be equal; leave it out, or give --method tiles"
            )

    @property
    def interval(self) -> Interval:
        """Return the interval between checkpoints."""
        return Interval.of(self.checkpoint_every)

    def check_model(self, spec: ModelSpec) -> None:
        """Refuse a job that does not fit a model.

        Raises:
            UsageError: when the sequence is longer than the model's positions.
        """
        if self.seq > spec.max_positions:
            raise UsageError(
                f"--seq {self.seq} is longer than the {spec.max_positions} positions of "
                f"{spec.name}; give {spec.max_positions} or less"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain values, for messages and TOML."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a job from plain values; the inverse of `to_dict`.

        Raises:
            UsageError: when a name is unknown or a value has the wrong type.
        """
        known = {f.name: f.type for f in fields(cls)}
        types: dict[str, type | tuple[type, ...]] = {
            "str": str,
            "int": int,
            "float": (int, float),
            "bool": bool,
            "int | str": (int, str),
        }
        for name, value in values.items():
            if name not in known:
                raise UsageError(f"a job has no setting {name!r}; it has {', '.join(known)}")
            flag = known[name] == "bool"  # Python's bool is also an int
            if not isinstance(value, types[str(known[name])]) or isinstance(value, bool) != flag:
                raise UsageError(f"setting {name!r} of a job is {value!r}, not {known[name]}")
        if "model" not in values:
            raise UsageError("a job needs a model; give --model")
        return cls(**values)


def _flag(name: str) -> str:
    return name.replace("_", "-")


_PUBLISHED_RATES = {  # OPT: arXiv 2205.01068, table 1; Llama 2: arXiv 2307.09288, section 2.2
    "opt-125m": 6e-4,
    "opt-350m": 3e-4,
    "opt-1.3b": 2e-4,
    "opt-2.7b": 1.6e-4,
    "opt-6.7b": 1.2e-4,
    "opt-13b": 1e-4,
    "opt-30b": 1e-4,
    "opt-66b": 0.8e-4,
    "opt-175b": 1.2e-4,
    "llama2-7b": 3e-4,
    "llama2-13b": 3e-4,
    "llama2-70b": 1.5e-4,
}


def default_learning_rate(spec: ModelSpec) -> float:
    """Return the published peak rate of a model, or one by size if there is none."""
    if spec.name in _PUBLISHED_RATES:
        return _PUBLISHED_RATES[spec.name]
    return 6e-4 if spec.parameters < 300e6 else 2e-4
