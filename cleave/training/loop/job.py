"""Specification of a training job: model, data and all settings of `cleave train`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Final, Self

from cleave.errors import UsageError
from cleave.planner.local_updates import EVERY, ExchangeKind, Rounds
from cleave.planner.plan import Method, StateMode
from cleave.training.lora.spec import LoraSpec
from cleave.workload.registry import ModelSpec
from cleave.workload.step import check_rank, check_step

DEFAULT_BATCH: Final = 4
DEFAULT_SEQ: Final = 128
_SETTING: Final = "setting"
_UNITS_S: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|h)")
_MOST_DIGITS: Final = 18
_MOST_NUMBER: Final = 2**63  # limit of TOML's integers, and half the limit of msgpack's


@dataclass(frozen=True, slots=True)
class Interval:
    """Interval between checkpoints, in steps or in seconds; no checkpoints if both are 0.

    With `seconds`, a checkpoint is due after the first step that ends at least `seconds` after the
    last checkpoint.
    """

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, text: int | str) -> Interval:
        """Parse an interval such as `500` (steps), `90s`, `10min`, `2h`, or `0` (no checkpoints).

        Raises:
            UsageError: if `text` is neither a number of steps nor a time.
        """
        said = str(text).strip()
        if said.isascii() and said.isdigit() and len(said) <= _MOST_DIGITS:
            return cls(steps=int(said))
        found = _TIME.fullmatch(said)
        seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
        if not seconds:
            raise UsageError(
                f"--checkpoint-every is {text!r}; use a number of steps, a time like 90s, 10min or "
                "2h, or 0 for no checkpoints"
            )
        return cls(seconds=seconds)

    def __bool__(self) -> bool:
        return bool(self.steps or self.seconds)

    def due(self, step: int, since_s: float) -> bool:
        """Return True if a checkpoint is due after `step`, `since_s` seconds after the last one."""
        if self.steps:
            return step % self.steps == 0
        return bool(self.seconds) and since_s >= self.seconds


class Precision(Enum):
    """Dtype of matrix multiplications. Trained weights and optimizer state are always fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class MemoryMode(Enum):
    """How the PS saves memory during training.

    PLAIN: all activations and gradients stay in memory. RECOMPUTE: activations are recomputed in
    the backward pass. LEAN: like RECOMPUTE. Without gradient accumulation, LEAN also updates each
    parameter as soon as its gradient is complete, and then frees the gradient. With gradient
    clipping or in fp16, this requires two backward passes, because all gradients must be checked
    before the first update. SHARDED: like RECOMPUTE, with the weights sharded across several
    servers. AUTO: the fastest of these modes that is estimated to fit in the machine's memory.
    """

    AUTO = "auto"
    PLAIN = "plain"
    RECOMPUTE = "recompute"
    LEAN = "lean"
    SHARDED = "sharded"


class OffloadMode(Enum):
    """Which GEMMs the fleet computes with `--method tiles`.

    ALL: every GEMM. AUTO: every GEMM that the PS is not predicted to compute faster.
    """

    ALL = "all"
    AUTO = "auto"


class FallbackMode(Enum):
    """Whether training waits or continues on the PS while no device is connected."""

    WAIT = "wait"
    LOCAL = "local"


class Packing(Enum):
    """How tokens attend to each other when a sequence contains several documents.

    JOINED: tokens attend to earlier documents in the sequence. SEPARATE: tokens attend only to
    their own document, positions restart with each document, and the first token of a document is
    not a training target.
    """

    JOINED = "joined"
    SEPARATE = "separate"


class OptimizerKind(Enum):
    """Kind of optimizer. The values are the names in `--optimizer`.

    ADAFACTOR: factors a matrix's second moments into rows and columns (arXiv 1804.04235). MUON:
    torch's `Muon` for the weight matrices of hidden layers, and AdamW for all other parameters,
    with one learning rate: Muon's updates are scaled to the magnitude of AdamW's.
    """

    ADAMW = "adamw"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    MUON = "muon"


class Decay(Enum):
    """Shape of the learning rate schedule after the warm-up. Values are the names in `--schedule`.

    COSINE and LINEAR decay until the last step. CONSTANT stays at the peak. WSD (warm-up, stable,
    decay) decays linearly, but only during the last `decay_steps` steps.
    """

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"


MAY_CHANGE: Final = (  # settings that may change when a run is resumed
    "steps", "eval_every", "eval_batches", "checkpoint_every", "save_total_limit", "keep_best",
    "early_stop", "sample_every", "prompt", "report_to", "memory", "state_dir", "method", "state",
    "audit", "offload", "journal", "fallback", "fallback_after_s", "against",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """Help text and limits of a `JobSpec` field, used to generate the field's CLI option.

    Attributes:
        help: description of the field for `--help`.
        common: whether `cleave train --help` lists the option. `--help-all` lists all options.
        names: names of the option; empty to derive the name from the field's name.
        least, most: minimum and maximum value; None for no limit. `most` applies only with `least`.
        below: exclusive upper limit; None for no limit. It applies only with `least`.
        choices: an enum whose values are the allowed values; None for a field without choices.
    """

    help: str
    common: bool = False
    names: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    below: float | None = None
    choices: type[Enum] | None = None

    def check(self, option: str, value: Any) -> None:
        """Raise UsageError if the value of `option` is out of range or not among the choices."""
        if isinstance(value, int) and abs(value) >= _MOST_NUMBER:
            raise UsageError(f"{option} must be a number below {_MOST_NUMBER:,}, not {value}")
        if self.choices is not None:
            values = [member.value for member in self.choices]
            if value not in values:
                raise UsageError(f"{option} is {value!r}; use one of {', '.join(values)}")
            return
        if self.least is None or not isinstance(value, int | float):
            return
        most = math.inf if self.most is None else self.most
        below = math.inf if self.below is None else self.below
        if not (self.least <= value <= most and value < below):
            raise UsageError(f"{option} must be {self._range}, not {value}")

    @property
    def _range(self) -> str:
        if self.most is not None:
            return f"a number from {self.least} to {self.most}"
        if self.below is not None:
            return f"a number from {self.least} to below {self.below}"
        return f"{self.least} or more"


def _setting(default: Any, help: str, *names: str, common: bool = False, **limits: Any) -> Any:
    """Return a dataclass field with a `Setting`. If `default` is `...`, the field is required."""
    known = {_SETTING: Setting(help, common, names, **limits)}
    return field(metadata=known) if default is ... else field(default=default, metadata=known)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A training job: model, data and settings. The help text of each field describes the field.

    Example:
        >>> JobSpec("opt-125m", steps=20, method="stages")
    """

    model: str = _setting(
        ..., "Model, such as opt-125m, a folder, or ORG/NAME after `hf download`.", common=True
    )
    data: str = _setting(
        "",
        "Text, folder, JSONL, Parquet or `datasets` name [default: Python's library]",
        common=True,
    )
    steps: int = _setting(100, "Optimizer steps in total.", common=True, least=1)
    batch: int = _setting(DEFAULT_BATCH, "Sequences per micro-batch.", common=True, least=1)
    seq: int = _setting(DEFAULT_SEQ, "Tokens per sequence.", common=True, least=1)
    packing: str = _setting(
        "joined",
        "How documents share a sequence: joined, or separate (documents do not attend to each "
        "other).",
        choices=Packing,
    )
    accumulate: int = _setting(1, "Micro-batches per step.", common=True, least=1)
    dtype: str = _setting(
        "fp32", "Dtype of the computation: fp32, bf16 or fp16.", common=True, choices=Precision
    )
    learning_rate: float = _setting(
        0.0,
        "Peak learning rate; 0 for the model's published rate.",
        "--learning-rate",
        "--lr",
        common=True,
        least=0,
    )
    warmup_steps: int = _setting(
        -1, "Warm-up steps; -1 for a tenth of the run, at most 100.", least=-1
    )
    schedule: str = _setting(
        "cosine",
        "Learning-rate schedule after the warm-up: cosine, linear, constant or wsd.",
        choices=Decay,
    )
    floor: float = _setting(0.1, "Final learning rate, as a share of the peak.", least=0, most=1)
    decay_steps: int = _setting(
        -1, "Number of decay steps in the wsd schedule; -1 for a tenth of the run.", least=-1
    )
    lora: str = _setting(
        "",
        "Train adapters: r=16,alpha=32,targets=q_proj+v_proj,dora,save=lm_head. With bits=4 or 8 "
        "the frozen weights are quantized (QLoRA).",
        common=True,
    )
    optimizer: str = _setting(
        "adamw", "Optimizer: adamw, sgd, adafactor or muon.", choices=OptimizerKind
    )
    beta1: float = _setting(
        0.9, "First beta of AdamW; sgd and adafactor ignore it.", least=0, below=1
    )
    beta2: float = _setting(
        0.95, "Second beta of AdamW; sgd and adafactor ignore it.", least=0, below=1
    )
    momentum: float = _setting(0.9, "Momentum of sgd and muon.", least=0, below=1)
    weight_decay: float = _setting(0.1, "Weight decay of matrices.", least=0)
    clip: float = _setting(1.0, "Largest gradient norm; 0 for no clipping.", least=0)
    seed: int = _setting(
        0, "Random seed for weights, dropout and data order.", common=True, least=0
    )
    eval_data: str = _setting("", "Held-out data, in the form of --data [default: 2% of --data]")
    eval_every: int = _setting(
        0, "Steps between held-out losses; 0 for none.", common=True, least=0
    )
    eval_batches: int = _setting(8, "Batches per held-out loss.", least=1)
    checkpoint_every: int | str = _setting(
        "10min",  # about the most training time that a crash can lose
        "Interval between checkpoints: steps, such as 500, or a time, such as 10min; 0 for none.",
        common=True,
    )
    save_total_limit: int = _setting(2, "Number of latest checkpoints to keep.", least=1)
    keep_best: bool = _setting(
        False, "Also keep the checkpoint with the lowest held-out loss.", "--keep-best"
    )
    early_stop: int = _setting(
        0, "Stop after this many held-out losses without improvement; 0 for never.", least=0
    )
    sample_every: int = _setting(0, "Steps between samples of --prompt; 0 for none.", least=0)
    prompt: str = _setting(
        "", "With --sample-every: a text to continue or, with a chat template, to answer."
    )
    report_to: str = _setting("", "Also log to: tensorboard, wandb, or tensorboard+wandb.")
    memory: str = _setting(
        "auto",
        "Memory mode of the server: auto, plain, recompute (activations), lean (recompute, and "
        "update during the backward pass), or sharded (recompute, and --servers share the "
        "weights).",
        choices=MemoryMode,
    )
    state_dir: str = _setting(
        "",
        "Folder for the optimizer state, in files; with --state devices, also for weights.",
    )
    method: str = _setting(
        "auto",
        "Method: stages (whole layers on devices), tiles, local (server alone), auto, or diloco "
        "(not exact: devices train alone and exchange weights rarely).",
        common=True,
        choices=Method,
    )
    every: int = _setting(
        EVERY, "With diloco: local steps between exchanges of weights.", least=1, most=10_000
    )
    fragments: int = _setting(
        1,
        "With diloco: parts of the model, which are exchanged one after the other.",
        least=1,
        most=1000,
    )
    overlap: int = _setting(
        0, "With diloco: local steps during an exchange of weights.", least=0, most=10_000
    )
    exchange: str = _setting(
        "bf16",
        "With diloco: form of exchanged weights: fp32, bf16, int8 or sparse (a 64th of the values, "
        "in 2 bits).",
        choices=ExchangeKind,
    )
    outer_lr: float = _setting(
        0.0,
        "With diloco: learning rate of the server's outer optimizer; 0: 0.7, or 1 if sparse.",
        least=0,
    )
    outer_momentum: float = _setting(
        0.9,
        "With diloco: Nesterov momentum of the outer optimizer; not used if sparse.",
        least=0,
        below=1,
    )
    state: str = _setting(
        "server",
        "Where layers' weights and optimizer state stay: server; devices (with --method stages: "
        "far less traffic, later audits); or auto (where steps are predicted to be faster).",
        choices=StateMode,
    )
    audit: float = _setting(
        0.05, "Probability that the server repeats a device's part of a stage.", least=0, most=1
    )
    offload: str = _setting(
        "all",
        "Products sent to the fleet by tiles: all, or auto (only if faster there).",
        choices=OffloadMode,
    )
    journal: bool = _setting(False, "Resume inside a step after a crash.", "--journal/--no-journal")
    fallback: str = _setting(
        "wait",
        "What to do without devices: wait, or local (compute on the server).",
        choices=FallbackMode,
    )
    fallback_after_s: float = _setting(
        30.0,
        "Seconds without devices before --fallback local takes effect.",
        "--fallback-after",
        least=0,
    )
    against: str = _setting(
        "",
        "Folder of another run, for example of plain PyTorch, whose losses are shown next to "
        "these.",
    )

    @classmethod
    def settings(cls) -> dict[str, Setting]:
        return {each.name: each.metadata[_SETTING] for each in fields(cls)}

    def comments(self) -> dict[str, str]:
        """Return the help of each setting whose number stands for another value, such as -1."""
        found = {}
        for name, setting in self.settings().items():
            value = getattr(self, name)
            if type(value) in (int, float) and (
                re.search(rf"(?<![\d.-]){value:g}( for|:)", setting.help)
                or (not value and "[default: " in setting.help)
            ):
                found[name] = setting.help
        return found

    def __post_init__(self) -> None:
        for name, setting in self.settings().items():
            option = setting.names[0].partition("/")[0] if setting.names else f"--{_flag(name)}"
            value = getattr(self, name)
            if isinstance(value, str) and value != value.encode("utf-8", "replace").decode():
                raise UsageError(
                    f"{option} is {value!r}, which is not UTF-8; rename the file or folder"
                )
            setting.check(option, value)
        if self.optimizer == OptimizerKind.SGD.value and not self.learning_rate:
            raise UsageError(
                "--optimizer sgd needs --learning-rate, because published rates are for AdamW"
            )
        Interval.of(self.checkpoint_every)
        self._check_adapters()
        for name in ("eval_data", "keep_best", "early_stop"):
            if getattr(self, name) and not self.eval_every:
                raise UsageError(f"--{_flag(name)} needs held-out losses; add --eval-every")
        if bool(self.sample_every) != bool(self.prompt):
            raise UsageError(
                f"--sample-every is {self.sample_every} and --prompt is {self.prompt!r}; set both "
                "or neither"
            )
        if self.journal and not self.interval:
            raise UsageError(
                "--journal keeps the work since the last checkpoint, but --checkpoint-every 0 "
                "makes no checkpoints; use a number of steps or a time"
            )
        if self.dtype == Precision.FP16.value and self.method == Method.STAGES.value:
            raise UsageError(
                "--dtype is 'fp16', but stages support only bf16 and fp32; use one of these, or "
                "--method tiles"
            )
        if self.journal and self.method == Method.STAGES.value:
            raise UsageError("--journal works only with tiles; omit it with --method stages")
        if self.state != StateMode.SERVER.value:
            self._check_devices_keep_state()
        if self.method == Method.DILOCO.value:
            self._check_local_updates()

    def _check_local_updates(self) -> None:
        """Raise UsageError if a setting cannot be combined with rounds of local updates."""
        if self.optimizer not in (OptimizerKind.ADAMW.value, OptimizerKind.SGD.value):
            raise UsageError(
                f"--optimizer is {self.optimizer!r}, whose steps devices cannot run; use adamw or "
                "sgd with --method diloco"
            )
        for option, unusable in (
            ("--dtype fp16", self.dtype == Precision.FP16.value),
            ("--packing separate", self.packing == Packing.SEPARATE.value),
            ("--fallback local", self.fallback == FallbackMode.LOCAL.value),
            ("--journal", self.journal),
            ("--memory sharded", self.memory == MemoryMode.SHARDED.value),
            ("a --lora with dropout", self.lora and LoraSpec.of(self.lora).dropout),
        ):
            if unusable:
                raise UsageError(
                    f"{option} cannot be combined with --method diloco; omit one of them"
                )
        Rounds(self.every, ExchangeKind(self.exchange), self.fragments, self.overlap)
        # The server has weights only at the end of a round.
        for name in ("steps", "eval_every", "sample_every"):
            if getattr(self, name) % self.every:
                raise UsageError(
                    f"--{_flag(name)} is {getattr(self, name)}, but --method diloco has weights "
                    f"only every {self.every} steps; use a multiple of --every"
                )

    def _check_devices_keep_state(self) -> None:
        if self.method != Method.STAGES.value:
            raise UsageError(
                f"--state {self.state} needs stages, but --method is {self.method!r}; use --method "
                "stages"
            )
        if self.optimizer not in (OptimizerKind.ADAMW.value, OptimizerKind.SGD.value):
            raise UsageError(
                f"--optimizer is {self.optimizer!r}, whose steps devices cannot run; use adamw or "
                "sgd, or --state server"
            )
        if self.fallback == FallbackMode.LOCAL.value:
            raise UsageError(
                "--fallback local computes on the server, which has no current weights with "
                f"--state {self.state}; use --fallback wait or --state server"
            )

    def _check_adapters(self) -> None:
        if not self.lora:
            return
        if self.quantized and self.journal:
            raise UsageError(
                f"--lora is {self.lora!r}, but --journal works only with tiles, which cannot use "
                "quantized weights; omit --journal or bits"
            )
        if self.quantized and self.method == Method.TILES.value:
            raise UsageError(
                f"--lora is {self.lora!r}, but tiles cannot use quantized weights; use --method "
                "stages, auto or local, or omit bits"
            )
        if LoraSpec.of(self.lora).dropout and self.method == Method.STAGES.value:
            raise UsageError(
                "--lora has dropout, which stages do not support, because a repeated pass must "
                "give the same result; omit it, or use --method tiles"
            )

    @property
    def fetch_steps(self) -> int:
        """Return the number of steps between two fetches of state that devices keep."""
        best = self.eval_every if self.keep_best else 0
        every = (self.steps, self.sample_every, self.interval.steps, best)
        return min(steps for steps in every if steps)

    @property
    def interval(self) -> Interval:
        """Return `checkpoint_every` as an `Interval`."""
        return Interval.of(self.checkpoint_every)

    @property
    def quantized(self) -> bool:
        """Return True if the job trains adapters on quantized weights (QLoRA)."""
        return bool(self.lora and LoraSpec.of(self.lora).bits)

    def check_model(self, spec: ModelSpec) -> None:
        """Raise UsageError if the model does not support the batch, the sequence or the adapter."""
        check_step(spec, self.batch * self.accumulate, self.seq)
        if self.lora:
            check_rank(spec, LoraSpec.of(self.lora).rank)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name, with values that TOML can represent."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a job from a mapping of setting names to values. Others get their defaults.

        Raises:
            UsageError: if a name is unknown, the model is missing, or a value is invalid.
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
                raise UsageError(f"a job has no setting {name!r}; use {', '.join(known)}")
            flag = known[name] == "bool"  # a separate check, because Python's bool is an int
            if not isinstance(value, types[str(known[name])]) or isinstance(value, bool) != flag:
                raise UsageError(
                    f"setting {name!r} of a job must be of type {known[name]}, not {value!r}"
                )
        if "model" not in values:
            raise UsageError("a job needs a model; add --model")
        return cls(**values)


def _flag(name: str) -> str:
    return name.replace("_", "-")


_PUBLISHED_RATES = {  # OPT: arXiv 2205.01068, table 1; Llama 2: arXiv 2307.09288, section 2.2
    "opt-125m": 6e-4, "opt-350m": 3e-4, "opt-1.3b": 2e-4, "opt-2.7b": 1.6e-4, "opt-6.7b": 1.2e-4,
    "opt-13b": 1e-4, "opt-30b": 1e-4, "opt-66b": 0.8e-4, "opt-175b": 1.2e-4,
    "llama2-7b": 3e-4, "llama2-13b": 3e-4, "llama2-70b": 1.5e-4,
}  # fmt: skip


def default_learning_rate(spec: ModelSpec) -> float:
    """Return a model's published peak learning rate, or a default that depends on its size."""
    return _PUBLISHED_RATES.get(spec.name, 6e-4 if spec.parameters < 300e6 else 2e-4)
