"""Sections 2 to 7 of the study's report, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from profiles.device_profile import DeviceKind
from simulator.study.conditions import ENERGY_CLAIM, Found
from simulator.study.study import Judged, SetupStudy, needed_flops_per_s
from simulator.verdict import Verdict, paragraphs, table


def between(values: Iterable[float]) -> str:
    """Format the lowest and highest ratio, such as "0.5 to 3"; empty if no ratio is given."""
    found = sorted(values)
    if not found:
        return ""
    low, high = ratio(found[0]), ratio(found[-1])
    return low if low == high else f"{low} to {high}"


def quantity(value: float) -> str:
    """Format a number to three significant digits, or as an integer if it is 100 or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(claim: tuple[float, float]) -> str:
    """Format the two ends of a claimed range, such as "1.5 to 4"."""
    return f"{claim[0]:g} to {claim[1]:g}"


def ratio(value: float | None) -> str:
    """Format a ratio to two significant digits, or as an integer if it is 100 or more."""
    if value is None:
        return "unknown"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def only_if_text(verdict: Verdict, settings: Mapping[str, str]) -> str:
    """Return the table cell with the settings under which a claim holds; "-" if not sometimes."""
    if verdict is not Verdict.SOMETIMES:
        return "-"
    text = "; ".join(f"{name}: {setting}" for name, setting in settings.items())
    return text or "no single condition; see 'One condition at a time'"


_CHARGER_OVER_PHONE: Final = 2.9
_PHONE_OVER_CLOUD: Final = 12


def fits(found: Sequence[SetupStudy]) -> list[str]:
    """Return section 2 of the report: the memory requirement and step time of each row."""
    rows = []
    for study in found:
        for judged in study.rows:
            row = judged.row
            rows.append(
                (
                    study.setup.name, row.method, str(row.usage.devices), " or ".join(row.offered),
                    f"{row.needed_bytes / 1e9:.3g} GB", "yes" if row.fits else "NO",
                    f"{row.step_s:.4g}", f"{row.usage.compute_s / row.usage.present_s:.0%}",
                    f"{row.usage.crossing_bytes / study.setup.steps / 1e9:.3g}",
                )
            )  # fmt: skip
        gpu = study.gpu
        rows.append(
            (
                study.setup.name, "A5000", "1", f"{gpu.installed_bytes / 1e9:g} GB",
                f"{gpu.needed_bytes / 1e9:.3g} GB", "NO" if gpu.misfit else "yes",
                f"{gpu.cloud.time_s / study.setup.steps:.4g}", "100%", "0",
            )
        )  # fmt: skip
    return paragraphs(
        "## 2. What fits, and how long it takes",
        "What a device offers is not known of the paper. Two amounts are tried: *given over* to "
        "training (laptops 12 GB, phones 6 GB: chosen) and *lent* beside other use (3 GB and 1 "
        "GB). Where the two make no difference there is one line. Times of what does not fit are "
        "what it would take with memory enough; such lines count for no verdict.",
        table(
            (
                "set-up", "method", "devices used", "memory each", "needed at most", "fits",
                "s for a step", "of it multiplying", "GB moved, a step",
            ),
            rows,
        ),
        "Reading: methods that keep layers and optimizer on devices need several times the memory "
        "that a device lends. Stages keep no optimizer there, and layers for a step only; tiles "
        "keep nothing and always fit, and pay for it with traffic.",
    )  # fmt: skip


def energy(found: Sequence[SetupStudy]) -> list[str]:
    """Return section 3 of the report: the energy of the devices and of the GPU."""
    rows = []
    for study in found:
        for judged in study.rows:
            held = judged.found.energy
            rows.append(
                (
                    study.setup.name, *_row_name(judged),
                    quantity(judged.found.fleet.energy_j / 3600),
                    quantity(judged.found.gpu.energy_j / 3600), *_held(judged, held),
                )
            )  # fmt: skip
    return paragraphs(
        "## 3. Energy",
        table(
            ("set-up", "method", "memory", "devices Wh", "GPU Wh", *_HELD, "verdict", "only if"),
            rows,
        ),
        "![Wh by part](energy.png)",
        "Reading: Wh in the central case of what fits, by what they go into. Where the bar is "
        "mostly *waiting* or *radio*, the network makes the devices wait; where it is "
        "*multiplying*, only faster or thriftier devices help. The parameter server of Cleave is "
        "in no bar: what it draws is unknown.",
        "![Ratios over all conditions](ratios.png)",
        "Reading: a claim holds where the whole bar is in the green or to the right of it, and "
        "holds only if some condition is met where a part of it is.",
    )


def carbon(found: Sequence[SetupStudy]) -> list[str]:
    """Return section 4 of the report: carbon, with and without the devices' manufacturing."""
    rows = []
    for study in found:
        for judged in study.rows:
            fleet, gpu = judged.found.fleet, judged.found.gpu
            for view, held in (
                ("attributed", judged.found.attributed),
                ("sunk cost", judged.found.sunk_cost),
            ):
                made_g = fleet.embodied_gco2e if view == "attributed" else 0.0
                rows.append(
                    (
                        study.setup.name, *_row_name(judged), view,
                        f"{quantity(fleet.operational_gco2e or 0)} + {quantity(made_g)}",
                        f"{quantity(gpu.operational_gco2e or 0)} + {quantity(gpu.embodied_gco2e)}",
                        *_held(judged, held),
                    )
                )  # fmt: skip
    return paragraphs(
        "## 4. Carbon",
        "Two views, since the choice decides the conclusion: see section 1.",
        table(
            (
                "set-up", "method", "memory", "view", "devices g, electricity + making",
                "GPU g, electricity + making", *_HELD, "verdict", "only if",
            ),
            rows,
        ),
        "Reading: a device that waits long is used long, so a slow method carries more of its "
        "making. Where making outweighs electricity, the view decides. The parameter server of "
        "Cleave is in no line, neither its electricity nor its making: which machine it is, is not "
        "known.",
        "![Carbon against utilisation](in-use.png)",
        "Reading: attributed carbon of the best line that fits, in the central case, if devices "
        "and GPU last 2, 3 or 4 years and are in use 20 to 80 % of that.",
    )  # fmt: skip


def speed(found: Sequence[SetupStudy]) -> list[str]:
    """Return section 5 of the report: the device speed that the energy claim needs."""
    rows = []
    for study in found:
        slow, fast = study.setup.measured_flops_per_s
        for method, points in study.speeds.items():
            needed = needed_flops_per_s(points, ENERGY_CLAIM[0])
            here = f"{study.setup.flops_per_s / 1e12:.3g}"
            such = f"{slow / 1e12:.2g} to {fast / 1e12:.2g}"
            never = f"never, up to {points[-1][0] / 1e12:.3g}"
            at = never if needed is None else f"{needed / 1e12:.2g}"
            rows.append((study.setup.name, method, here, such, at))
    return paragraphs(
        "## 5. How fast a device must be",
        "The same power, another speed: from which speed on do the devices take 1.5 times less "
        "energy than the GPU, in the central case? Speeds of laptops are in multiplication alone, "
        "of which training reaches half and tiles all; those of phones are end to end. The largest "
        "memory of section 2.",
        table(
            (
                "set-up", "method", "TFLOP/s of a device here", "such devices, and newer ones",
                "TFLOP/s needed",
            ),
            rows,
        ),
        "![Energy against speed](speed.png)",
        "Reading: the black line is the device as it is here, the grey band what was measured of "
        "such devices and newer ones. Curves that level off below the green are held back by the "
        "links, not by the device.",
    )  # fmt: skip


def contrary(found: Sequence[SetupStudy]) -> list[str]:
    """Return section 6 of the report: a comparison with another paper's findings about phones."""
    rows = []
    for study in found:
        if study.setup.profile.kind is not DeviceKind.PHONE:
            continue
        judged = study.best
        here = study.setup.flops_per_s
        for flops_per_s in (here, study.setup.measured_flops_per_s[1]):
            compute = judged.found.compute_over_gpu * here / flops_per_s
            rows.append(
                (
                    study.setup.name, judged.row.method, f"{flops_per_s / 1e12:.3g}",
                    ratio(compute), ratio(compute * _CHARGER_OVER_PHONE),
                    "yes" if compute <= _PHONE_OVER_CLOUD else "no, more",
                )
            )  # fmt: skip
    return paragraphs(
        "## 6. The contrary finding",
        "Google (*Communications of the ACM* 2024) finds that chargers take about "
        f"{_CHARGER_OVER_PHONE} times what phones use, and that training on phones takes up to "
        f"{_PHONE_OVER_CLOUD} times the energy of computing in a data centre, and up to 25 times "
        "the carbon at equal energy. Here, joules that phones spend on multiplying over those of "
        "the bare card for the same work:",
        table(
            (
                "set-up", "method", "TFLOP/s of a phone", "phones over GPU, computing alone",
                f"with chargers of {_CHARGER_OVER_PHONE}", f"within {_PHONE_OVER_CLOUD} times",
            ),
            rows,
        ),
        "Reading: both findings can be true, of different phones. The measured speed of this phone "
        "is that of a framework on its processor, a lower bound; the other line is the fastest "
        "phone that was measured, at the same power. Which phone it is decides between the two "
        "papers more than any way of accounting. The 25 times cannot be checked: the grids and "
        "the machines behind it are not known here.",
    )  # fmt: skip


def depends(found: Sequence[SetupStudy], tornados: Sequence[str]) -> list[str]:
    """Return section 7 of the report: the sensitivity of the ratios to each assumption.

    `tornados` lists the file names of the tornado plots, in the order of `figures.tornado_files`.
    """
    lines = paragraphs(
        "## 7. What it depends on",
        "The best line of each set-up that fits, in the central case, with one assumption at a "
        "time at its ends. Green is as claimed; a bar that reaches it is an assumption that makes "
        "or breaks the claim on its own.",
    )
    files = iter(tornados)
    for study in found:
        for dependence in study.dependences:
            widest = ", ".join(
                f"{bar.name} ({bar.low_setting}: {ratio(bar.low)}, {bar.high_setting}: "
                f"{ratio(bar.high)})"
                for bar in dependence.bars[:3]
            )
            lines += paragraphs(
                f"![{study.setup.name}: {dependence.of}]({next(files)})",
                f"Reading: {study.setup.name}, {dependence.row.name}, {dependence.of} "
                f"{ratio(dependence.middle)}; most depends on {widest}.",
            )
    return lines


# --- cells ---

_HELD = ("ratio, central case", "over all conditions")


def _held(judged: Judged, held: Found) -> tuple[str, ...]:
    verdict = held.verdict.value if judged.row.fits else "does not fit"
    if held.verdict is Verdict.SOMETIMES and judged.row.fits:
        verdict += f" ({held.held} of {held.tried})"
    ends = f"{ratio(held.least)} to {ratio(held.most)}"
    only_if = only_if_text(held.verdict, held.only_if) if judged.row.fits else "-"
    return ratio(held.central), ends, verdict, only_if


def _row_name(judged: Judged) -> tuple[str, str]:
    return judged.row.method, " or ".join(judged.row.offered)
