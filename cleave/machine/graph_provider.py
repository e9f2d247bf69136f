"""The *execution providers* with which ONNX Runtime can run graphs, and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cleave.errors import UsageError


class Provider(Enum):
    """An execution provider, by its name on the command line."""

    CUDA = "cuda"
    COREML = "coreml"
    DIRECTML = "directml"
    CPU = "cpu"


AUTO: Final = "auto"
"""The command line's name for the best available provider."""

_RUNTIME_NAMES: Final = {
    Provider.CUDA: "CUDAExecutionProvider",
    Provider.COREML: "CoreMLExecutionProvider",
    Provider.DIRECTML: "DmlExecutionProvider",
    Provider.CPU: "CPUExecutionProvider",
}


@dataclass(frozen=True, slots=True)
class ProviderSetup:
    """A provider with its options.

    Attributes:
        options: options by ONNX Runtime's names.
    """

    provider: Provider
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def runtime_name(self) -> str:
        """Return ONNX Runtime's name of the provider."""
        return _RUNTIME_NAMES[self.provider]

    def __str__(self) -> str:
        """Return the provider's command-line name, and its options if it has any."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return self.provider.value + (f" ({options})" if options else "")


CPU_SETUP: Final = ProviderSetup(Provider.CPU)

SETUPS: Final = (
    # TF32, the default, keeps only 10 bits of the factors' mantissas.
    ProviderSetup(Provider.CUDA, {"use_tf32": "0"}),
    # The older model format and Apple's neural engine compute in 16 bits.
    ProviderSetup(
        Provider.COREML,
        {
            "ModelFormat": "MLProgram",
            "MLComputeUnits": "CPUAndGPU",
            "AllowLowPrecisionAccumulationOnGPU": "0",
        },
    ),
    ProviderSetup(Provider.COREML, {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUOnly"}),
    ProviderSetup(Provider.DIRECTML),
    # Metacommands are a driver's own kernels, which may be less exact.
    ProviderSetup(Provider.DIRECTML, {"disable_metacommands": "true"}),
    CPU_SETUP,
)
"""Setups meant to compute in full precision, in the order in which they are tried. Setups of one
provider are ordered by speed."""


def parse_provider(name: str) -> Provider | None:
    """Return the provider that a user names, or None for `auto`.

    Raises:
        UsageError: for an unknown name.
    """
    if name == AUTO:
        return None
    try:
        return Provider(name)
    except ValueError:
        known = ", ".join([AUTO, *(provider.value for provider in reversed(Provider))])
        raise UsageError(
            f"--provider {name!r} is no provider of graphs; use one of {known}"
        ) from None


def setups_of(asked: Provider | None, runtime_names: Sequence[str]) -> tuple[ProviderSetup, ...]:
    """Return the setups to try, best first; the last is the CPU's, which is always available.

    Args:
        asked: the only provider besides the CPU that may be used; None for all.
        runtime_names: ONNX Runtime's names of the available providers.
    """
    return tuple(
        setup
        for setup in SETUPS
        if setup is CPU_SETUP
        or (setup.runtime_name in runtime_names and asked in (None, setup.provider))
    )
