"""The study as a report in Markdown that needs no knowledge of the paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cleave.footprint.study.cells import between, ratio, span, table
from cleave.footprint.study.conditions import (
    CARBON_CLAIM,
    ENERGY_CLAIM,
    Axis,
    carbon_axes,
    energy_axes,
)
from cleave.footprint.study.inputs import Input, unconfirmed
from cleave.footprint.study.study import Judged, SetupStudy, needed_flops_per_s
from cleave.footprint.study.verdicts import Found, together
from cleave.simulation.claims import Verdict
from profiles.device_profile import DeviceKind

CHARGER_OVER_PHONE = 2.9
PHONE_OVER_CLOUD = 12


def report(found: Sequence[SetupStudy], figures: Sequence[Input], tornados: Iterable[str]) -> str:
    """The text of `report.md`.

    Args:
        found: by set-up.
        figures: that it is made from.
        tornados: files of `figures.tornado_files`.
    """
    lines = [
        *_what(found),
        *_claims(found),
        *_fits(found),
        *_energy(found),
        *_carbon(found),
        *_speed(found),
        *_contrary(found),
        *_depends(found, list(tornados)),
        *_conditions(),
        *_figures(figures),
    ]
    return "\n".join(lines) + "\n"


def _what(found: Sequence[SetupStudy]) -> list[str]:
    first = found[0].setup
    names = "; ".join(f"{study.setup.model} on {study.setup.title}" for study in found)
    return [
        "# Training on laptops and phones against a GPU: energy and carbon",
        "",
        "The paper *arXiv 2507.01803* (HotCarbon 2025) trained language models on laptops and "
        f"phones and says that this took {span(ENERGY_CLAIM)} times less energy than an NVIDIA "
        f"A5000 and caused {span(CARBON_CLAIM)} times less carbon, when making the machines "
        "counts. Here its set-up is simulated and both claims are held against it. Its own tables "
        "of joules could not be read: none of its measurements is in this report, only its set-up.",
        "",
        f"Set-up: {names}. {first.steps} steps of {first.batch} sequences of {first.seq} tokens in "
        "bf16; links of 10 MB/s both ways; Wi-Fi of 0.5 W. Laptops are M2 Pro in the paper and M1 "
        "Pro here, whose multiplication was measured; phones are Snapdragon 888.",
        "",
        "Methods: *alone*, one device does it all. *dtfm*, DT-FM (Yuan et al. 2022): layers are "
        "spread over devices that send activations to each other, on all devices (*dtfm-all*, as "
        "in the paper) or on as many as are fastest (*dtfm*); *formula* as DT-FM's paper has it, "
        "*pipelined* with everything overlapped, *serial* with nothing overlapped. *cleave*: "
        "devices multiply tiles and keep nothing; *cleave-2d*: the published tiles; "
        "*cleave-resident*: devices keep some layers for a step (simulated, not built).",
        "",
        "A ratio is what the GPU takes over what the devices take: above 1 the devices take less. "
        "The *central case* counts what the paper's formulae count: chargers as the rules ask, no "
        "network, the GPU's machine and data centre, devices as they come, a GPU at half of its "
        "speed in multiplication; carbon with making shared out to both by the time used.",
    ]


def _claims(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        published = study.published()
        for what, claim, each in (
            ("energy", ENERGY_CLAIM, [judged.found.energy for judged in published]),
            ("carbon", CARBON_CLAIM, [judged.found.carbon for judged in published]),
        ):
            rows.append(
                (
                    study.setup.name,
                    f"{span(claim)} times less {what}",
                    together(one.verdict for one in each).value if each else "does not fit",
                    between(one.central for one in each),
                    f"{ratio(min(o.least for o in each))} to {ratio(max(o.most for o in each))}"
                    if each
                    else "",
                    _only_if(each),
                )
            )
    return [
        "",
        "## 1. Do the claims hold?",
        "",
        "By the paper's own methods, on memory that fits. *Holds* means: the lower end of the "
        "claim or more in every combination of the conditions of section 8. *Only if*: what "
        "every combination in which it holds has; that alone need not be enough.",
        "",
        *table(
            ("set-up", "claim", "verdict", "ratio, central case", "over all conditions", "only if"),
            rows,
        ),
        "",
        f"Reading: {_reading(found)}",
    ]


def _reading(found: Sequence[SetupStudy]) -> str:
    texts = []
    for study in found:
        energy = [judged.found.energy for judged in study.published()]
        if not energy:
            continue
        best = max(one.central for one in energy)
        worth = "less" if best >= 1 else "more"
        times = best if best >= 1 else 1 / best
        texts.append(f"{study.setup.title}: {ratio(times)} times {worth} energy than the GPU")
    return (
        "at best, in the central case, " + "; ".join(texts) + ". How fast a device multiplies "
        "for each watt decides this, see section 5."
    )


def _fits(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        for judged in study.rows:
            row = judged.row
            rows.append(
                (
                    study.setup.name, row.method, str(row.spell.devices), " or ".join(row.offered),
                    f"{row.needed_bytes / 1e9:.3g} GB", "yes" if row.fits else "NO",
                    f"{row.step_s:.4g}", f"{row.spell.compute_s / row.spell.present_s:.0%}",
                    f"{_gigabytes(judged):.3g}",
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
    return [
        "",
        "## 2. What fits, and how long it takes",
        "",
        "What a device offers is not known of the paper. Two amounts are tried: *given over* to "
        "training (laptops 12 GB, phones 6 GB: chosen) and *lent* beside other use (3 GB and 1 "
        "GB). Where the two make no difference there is one line. Times of what does not fit are "
        "what it would take with memory enough; such lines count for no verdict.",
        "",
        *table(
            (
                "set-up", "method", "devices used", "memory each", "needed at most", "fits",
                "s for a step", "of it multiplying", "GB moved, a step",
            ),
            rows,
        ),
        "",
        "Reading: methods that keep layers on devices need several times the memory that a device "
        "lends; tiles always fit, and pay for it with traffic.",
    ]  # fmt: skip


def _gigabytes(judged: Judged) -> float:
    spell = judged.row.spell
    return (spell.down_bytes + spell.up_bytes) / judged.row.setup.steps / 1e9


def _energy(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        for judged in study.rows:
            held = judged.found.energy
            rows.append(
                (
                    study.setup.name, *_row_name(judged),
                    f"{judged.found.fleet.energy_j / 3600:.3g}",
                    f"{judged.found.gpu.energy_j / 3600:.3g}", *_held(judged, held),
                )
            )  # fmt: skip
    return [
        "",
        "## 3. Energy",
        "",
        *table(
            ("set-up", "method", "memory", "devices Wh", "GPU Wh", *_HELD, "verdict", "only if"),
            rows,
        ),
        "",
        "![Wh by part](energy.png)",
        "",
        "Reading: Wh in the central case of what fits, by what they go into. Where the bar is "
        "mostly *waiting* or *radio*, the network makes the devices wait; where it is "
        "*multiplying*, only faster or thriftier devices help. The parameter server of Cleave is "
        "in no bar: what it draws is unknown.",
        "",
        "![Ratios over all conditions](ratios.png)",
        "",
        "Reading: a claim holds where the whole bar is in the green or to the right of it, and "
        "holds only if some condition is met where a part of it is.",
    ]


def _carbon(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        for judged in study.rows:
            ratios, fleet, gpu = judged.found.ratios, judged.found.fleet, judged.found.gpu
            rows.append(
                (
                    study.setup.name, *_row_name(judged),
                    f"{fleet.operational_gco2e or 0:.3g} + {fleet.embodied_gco2e:.3g}",
                    f"{gpu.operational_gco2e or 0:.3g} + {gpu.embodied_gco2e:.3g}",
                    ratio(ratios.sunk_cost), *_held(judged, judged.found.carbon),
                )
            )  # fmt: skip
    return [
        "",
        "## 4. Carbon",
        "",
        "Two views, since the choice decides the conclusion. *Attributed*: devices and GPU both "
        "carry the share of making them that falls to the time they are used. *Sunk cost*: the "
        "devices have been made anyway and carry none; the GPU was made for the job. The central "
        "ratio is attributed; that over all conditions takes in both.",
        "",
        *table(
            (
                "set-up", "method", "memory", "devices g, electricity + making",
                "GPU g, electricity + making", "ratio, sunk cost", *_HELD, "verdict", "only if",
            ),
            rows,
        ),
        "",
        "Reading: a device that waits long is used long, so a slow method carries more of its "
        "making. Where making outweighs electricity, the view decides.",
        "",
        "![Carbon against utilisation](in-use.png)",
        "",
        "Reading: attributed carbon of the best line that fits, in the central case, if devices "
        "and GPU last 2, 3 or 4 years and are in use 20 to 80 % of that.",
    ]  # fmt: skip


def _speed(found: Sequence[SetupStudy]) -> list[str]:
    rows = []
    for study in found:
        slow, fast = study.setup.measured_flops_per_s
        for method, points in study.speeds.items():
            needed = needed_flops_per_s(points, ENERGY_CLAIM[0])
            rows.append(
                (
                    study.setup.name,
                    method,
                    f"{study.setup.flops_per_s / 1e12:.3g}",
                    f"{slow / 1e12:.2g} to {fast / 1e12:.2g}",
                    f"never, up to {points[-1][0] / 1e12:.3g}"
                    if needed is None
                    else f"{needed / 1e12:.2g}",
                )
            )
    return [
        "",
        "## 5. How fast a device must be",
        "",
        "The same power, another speed: from which speed on do the devices take 1.5 times less "
        "energy than the GPU, in the central case? The largest memory of section 2.",
        "",
        *table(
            (
                "set-up", "method", "TFLOP/s of a device here", "such devices, and newer ones",
                "TFLOP/s needed",
            ),
            rows,
        ),
        "",
        "![Energy against speed](speed.png)",
        "",
        "Reading: the black line is the device as it is here, the grey band what was measured of "
        "such devices and newer ones. Curves that level off below the green are held back by the "
        "links, not by the device.",
    ]  # fmt: skip


def _contrary(found: Sequence[SetupStudy]) -> list[str]:
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
                    study.setup.name,
                    judged.row.method,
                    f"{flops_per_s / 1e12:.3g}",
                    ratio(compute),
                    ratio(compute * CHARGER_OVER_PHONE),
                    "yes" if compute <= PHONE_OVER_CLOUD else "no, more",
                )
            )
    return [
        "",
        "## 6. The contrary finding",
        "",
        "Google (*Communications of the ACM* 2024) finds that chargers take about "
        f"{CHARGER_OVER_PHONE} times what phones use, and that training on phones takes up to "
        f"{PHONE_OVER_CLOUD} times the energy of computing in a data centre, and up to 25 times "
        "the carbon at equal energy. Here, joules that phones spend on multiplying over those of "
        "the bare card for the same work:",
        "",
        *table(
            (
                "set-up", "method", "TFLOP/s of a phone", "phones over GPU, computing alone",
                f"with chargers of {CHARGER_OVER_PHONE}", f"within {PHONE_OVER_CLOUD} times",
            ),
            rows,
        ),
        "",
        "Reading: both findings can be true, of different phones. The measured speed of this phone "
        "is that of a framework on its processor, a lower bound; the other line is the fastest "
        "phone that was measured, at the same power. Which phone it is decides between the two "
        "papers more than any way of accounting. The 25 times cannot be checked: the grids and "
        "the machines behind it are not known here.",
    ]  # fmt: skip


def _depends(found: Sequence[SetupStudy], tornados: Sequence[str]) -> list[str]:
    lines = [
        "",
        "## 7. What it depends on",
        "",
        "The best line of each set-up that fits, in the central case, with one assumption at a "
        "time at its ends. Green is as claimed; a bar that reaches it is an assumption that makes "
        "or breaks the claim on its own.",
    ]
    files = iter(tornados)
    for study in found:
        for dependence in study.dependences:
            widest = ", ".join(
                f"{bar.name} ({bar.low_setting}: {ratio(bar.low)}, {bar.high_setting}: "
                f"{ratio(bar.high)})"
                for bar in dependence.bars[:3]
            )
            lines += [
                "",
                f"![{study.setup.name}: {dependence.of}]({next(files)})",
                "",
                f"Reading: {study.setup.name}, {dependence.row.name}, {dependence.of} "
                f"{ratio(dependence.middle)}; most depends on {widest}.",
            ]
    return lines


def _conditions() -> list[str]:
    energy, carbon = energy_axes(), carbon_axes()

    def listed(axes: Iterable[Axis]) -> list[tuple[str, str]]:
        return [(axis.name, "; ".join(s.title for s in axis.settings)) for axis in axes]

    def product(axes: Iterable[Axis]) -> int:
        total = 1
        for axis in axes:
            total *= len(axis.settings)
        return total

    return [
        "",
        "## 8. The conditions",
        "",
        f"A claim of energy was held against {product(energy)} combinations (first five), one of "
        f"carbon against {product((*energy, *carbon))} (all). The first setting of each is the "
        "central case. How many combinations hold is no probability.",
        "",
        *table(("condition", "settings"), listed((*energy, *carbon))),
    ]


def _figures(figures: Sequence[Input]) -> list[str]:
    rows = [(i.name, i.used, i.range or "-", i.standing.value, i.source or "-") for i in figures]
    names = ", ".join(each.name for each in unconfirmed(figures))
    return [
        "",
        "## 9. Where the figures are from",
        "",
        "Every energy here is modelled; nothing was measured for this report. *Not confirmed* "
        "means that no source kept with this project says so: "
        f"{names}. What they would change is in section 7.",
        "",
        *table(("figure", "used", "range", "standing", "source"), rows),
    ]


# --- cells ---

_HELD = ("ratio, central case", "over all conditions")


def _held(judged: Judged, held: Found) -> tuple[str, ...]:
    verdict = held.verdict.value if judged.row.fits else "does not fit"
    if held.verdict is Verdict.SOMETIMES and judged.row.fits:
        verdict += f" ({held.held} of {held.tried})"
    ends = f"{ratio(held.least)} to {ratio(held.most)}"
    return ratio(held.central), ends, verdict, _conditions_text(held.only_if)


def _row_name(judged: Judged) -> tuple[str, str]:
    return judged.row.method, " or ".join(judged.row.offered)


def _only_if(each: Sequence[Found]) -> str:
    """What all that hold at all have in common."""
    holding = [found.only_if for found in each if found.held]
    if not holding:
        return "-"
    common = {k: v for k, v in holding[0].items() if all(o.get(k) == v for o in holding)}
    return _conditions_text(common)


def _conditions_text(settings: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {setting}" for name, setting in settings.items()) or "-"
