"""Plot the losses of `cleave demo`: of one machine and of devices, on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cleave.files import save_figure


def draw_losses(
    path: Path, alone: Sequence[float], together: Sequence[float], devices: int, killed_after: int
) -> None:
    """Plot the losses of both runs by step, and when a device was killed.

    Args:
        alone: loss of each step on one machine.
        together: loss of each step on devices.
        devices: number of devices before one was killed.
        killed_after: number of the step after which it was killed.

    Raises:
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(alone) + 1)
    # The wide line stays visible below the narrow one.
    axes.plot(steps, alone, color="#f0b27a", linewidth=9, label="this machine alone, plain PyTorch")
    axes.plot(
        steps, together, color="#1f4e79", linewidth=1.5, marker="o", markersize=4,
        label=f"{devices} devices, one of which is killed",
    )  # fmt: skip
    axes.axvline(killed_after + 0.5, color="#b03a2e", linestyle="--", linewidth=1.2)
    axes.annotate(
        f" a device is killed;\n the other {devices - 1} do its work",
        (killed_after + 0.5, max(alone)), color="#b03a2e", va="top",
    )  # fmt: skip
    off = max(abs(one - other) / other for one, other in zip(together, alone, strict=True))
    axes.set(
        title=f"The same losses on one machine and on devices (at most {100 * off:.2g} % apart)",
        xlabel="step",
        ylabel="loss (nats per token)",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower left")
    save_figure(figure, path, 120)
