"""The *execution providers* of ONNX Runtime, which run graphs on different hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cleave.errors import UsageError


class Provider(Enum):
    """An execution provider. The value is the provider's name on the command line."""

    CUDA = "cuda"
    COREML = "coreml"
    DIRECTML = "directml"
    CPU = "cpu"


AUTO: Final = "auto"
"""Name that selects the best available provider on the command line."""

_RUNTIME_NAMES: Final = {
    Provider.CUDA: "CUDAExecutionProvider",
    Provider.COREML: "CoreMLExecutionProvider",
    Provider.DIRECTML: "DmlExecutionProvider",
    Provider.CPU: "CPUExecutionProvider",
}


@dataclass(frozen=True, slots=True)
class ProviderSetup:
    """An execution provider with options.

    Attributes:
        provider: the execution provider.
        options: maps ONNX Runtime's names of options to values.
    """

    provider: Provider
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def runtime_name(self) -> str:
        """Return ONNX Runtime's name of the provider."""
        return _RUNTIME_NAMES[self.provider]

    def __str__(self) -> str:
        """Return the provider's command-line name, followed by the options if there are any."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return self.provider.value + (f" ({options})" if options else "")


CPU_SETUP: Final = ProviderSetup(Provider.CPU)

SETUPS: Final = (
    # By default CUDA uses TF32, which keeps only 10 bits of the operands' mantissas.
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
    # Metacommands are kernels of the GPU driver, which may be less precise.
    ProviderSetup(Provider.DIRECTML, {"disable_metacommands": "true"}),
    CPU_SETUP,
)
"""Provider setups that should compute in full fp32 precision, in the order in which they are tried.
For each provider, the fastest setup comes first."""


def parse_provider(name: str) -> Provider | None:
    """Convert a provider's command-line name to the provider, and `auto` to None.

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
    """Return the provider setups to try, with the best setup first.

    The last setup is that of the CPU, which is always available.

    Args:
        asked: the only provider other than the CPU that may be used; None to allow all providers.
        runtime_names: ONNX Runtime's names of the available providers.
    """
    return tuple(
        setup
        for setup in SETUPS
        if setup is CPU_SETUP
        or (setup.runtime_name in runtime_names and asked in (None, setup.provider))
    )
