"""Settings of LoRA adapters (arXiv 2106.09685), parsed from the option `--lora`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from cleave.errors import UsageError, to_install

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR: Final = "all-linear"  # value of `targets`: all linear layers except the LM head

# QLoRA's rate for models of up to 13B parameters (arXiv 2305.14314, appendix B.2).
LEARNING_RATE: Final = 2e-4

_FORM: Final = "as in --lora r=16,alpha=32,targets=q_proj+v_proj"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Settings of a model's adapters.

    Attributes:
        rank: rank of each adapter, the matrix product B A.
        alpha: scale of the adapters. B A is multiplied by alpha / rank.
        targets: names of the linear layers that get adapters, such as `q_proj`; or `ALL_LINEAR`.
        dropout: dropout probability of each adapter's input; must be 0 for training by stages.
        dora: whether to train weight norms in addition to B and A (DoRA, arXiv 2402.09353).
        save: names of modules whose original weights are trained and are saved with the adapters.
        bits: bits per element of the quantized frozen weights, 4 or 8; 0 for no quantization.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0
    dora: bool = False
    save: tuple[str, ...] = ()
    bits: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse the value of `--lora`, such as `r=16,alpha=32,targets=q_proj+v_proj,dora`.

        By default, alpha is twice the rank.

        Raises:
            UsageError: if the value is malformed.
        """
        given: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in _READERS:
                raise UsageError(f"--lora has {item!r}; choose from {', '.join(_READERS)}, {_FORM}")
            if name in given:
                raise UsageError(f"--lora has {name} twice; set it once")
            given[name] = value
        values: dict[str, Any] = {}
        for name, value in given.items():
            attribute, read, needs = _READERS[name]
            try:
                values[attribute] = read(value)
            except (KeyError, ValueError):
                raise UsageError(f"--lora has {name}={value}; use {needs}, {_FORM}") from None
        values.setdefault("alpha", 2.0 * values.get("rank", cls().rank))
        return cls(**values)

    def config(self) -> LoraConfig:
        """Return `peft`'s configuration for these settings. It does not include `bits`."""
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise UsageError(
                f"--lora needs peft ({error}); install it with: {to_install('lora')}"
            ) from error
        every = self.targets == (ALL_LINEAR,)
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=ALL_LINEAR if every else list(self.targets),
            lora_dropout=self.dropout,
            use_dora=self.dora,
            modules_to_save=list(self.save) or None,
        )


def _where(read: Callable[[str], Any], fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Wrap the parser `read` so that it raises ValueError for values that `fits` rejects."""

    def checked(text: str) -> Any:
        if not fits(value := read(text)):
            raise ValueError
        return value

    return checked


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("+"))


_READERS: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "r": ("rank", _where(int, lambda n: n >= 1), "a whole number, 1 or more"),
    "alpha": ("alpha", _where(float, lambda n: 0 < n < float("inf")), "a number above 0"),
    "targets": (
        "targets",
        _where(_names, all),
        f"names of linear layers with + between them, or {ALL_LINEAR}",
    ),
    "dropout": ("dropout", _where(float, lambda n: 0 <= n < 1), "a probability below 1"),
    "dora": ("dora", {"": True, "true": True, "false": False}.__getitem__, "true or false"),
    "save": ("save", _where(_names, all), "names of modules with + between them"),
    "bits": ("bits", {"4": 4, "8": 8}.__getitem__, "4 or 8"),
}
