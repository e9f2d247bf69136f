"""Test the Cleave paper's claims against simulated results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from benchmarks.published_claims.verdict import OURS, Claim, ClaimTrial, figure
from simulator.method import Outcome
from simulator.sweep import Row

DETECTION_S: Final = 5.0
UNLIMITED: Final = "unlimited"
_DTFM: Final = tuple(
    f"{name} ({variant})"
    for name in ("dtfm", "dtfm-all")
    for variant in ("formula", "pipelined", "serial")
)
_PIPELINES: Final = (*_DTFM, "alpa", "asteroid", "confidant", "data-parallel")
_WORTH_IT: Final = 0.9  # more devices are useful if they reduce the step time to this share
_COMPARABLE: Final = 1.5  # a step is comparable if it takes up to this multiple of the cloud's step


@dataclass(frozen=True, slots=True)
class Evidence:
    """Simulated results with which the claims are tested.

    Attributes:
        model: name of the main model, which is simulated with all device counts.
        rows: maps a model name to its results with an unlimited PS network card.
        small: results of Cleave's methods for the main model on devices with 512 MB.
        carded: maps the name of a limited PS network card to the results of Cleave's methods for
            the main model.
        roomy: results of all non-cloud methods for the main model on devices with 32 GB.
    """

    model: str
    rows: Mapping[str, Sequence[Row]]
    small: Sequence[Row] = ()
    carded: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    roomy: Sequence[Row] = ()
    layers: Mapping[str, int] = field(default_factory=dict)

    def by_count(self, model: str) -> Iterator[tuple[int, dict[str, Outcome]]]:
        """Yield each device count with the outcomes by method name, for an unlimited PS card."""
        yield from _by_count(self.rows[model])

    def by_card(self, model: str) -> Iterator[tuple[str, int, dict[str, Outcome]]]:
        """Yield each PS network card and device count with the outcomes by method name.

        For limited cards, only Cleave's methods have outcomes.
        """
        for count, found in _by_count(self.rows[model]):
            yield UNLIMITED, count, found
        for card, rows in self.carded.items() if model == self.model else ():
            for count, found in _by_count(rows):
                yield card, count, found


def _by_count(rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, Outcome]]]:
    for count in sorted({row.devices for row in rows if row.devices is not None}):
        yield count, {r.outcome.method: r.outcome for r in rows if r.devices == count}


def faster_than_dtfm(evidence: Evidence) -> Claim:
    """Test the claim that Cleave is 4-10x faster per batch than DT-FM on equally many devices."""
    rows, trials, fitting = [], [], 0
    for model in evidence.rows:
        baselines = dict(evidence.by_count(model))
        for card, count, found in evidence.by_card(model):
            ours = {name: found[name] for name in OURS if name in found}
            for baseline in _DTFM:
                other = baselines[count][baseline]
                fitting += other.fits
                ratios = {name: other.step_s / o.step_s for name, o in ours.items()}
                trials += [
                    ClaimTrial(name, count, baseline, card, model, ratio >= 4, ratio or None)
                    for name, ratio in ratios.items()
                ]
                rows.append(
                    (
                        model, str(count), card, baseline, _seconds(other.step_s), _fits(other),
                        other.setting,
                        *(_times(ratios.get(name, 0.0)) for name in OURS),
                        _fits(ours["cleave"]) if "cleave" in ours else "-",
                    )
                )  # fmt: skip
    shares = ", ".join(
        f"{sum(held)} of {len(held)} by {name}"
        for name in OURS
        if (held := [trial.held for trial in trials if trial.method == name])
    )
    return Claim(
        "4-10 times less time for a batch than DT-FM, at equal numbers of devices",
        "4x or more",
        f"The columns with our methods' names are DT-FM's time over ours: 4x is four times faster, "
        f"0.2x five times slower, - has no plan that fits. A factor of 4 or more was found in "
        f"{shares}. `dtfm` takes as many of the devices as are fastest, `dtfm-all` all of them; it "
        f"has no parameter server, so its times do not depend on the card. It fits in {fitting} of "
        f"{len(rows)} rows; in the others its time is what it would take with memory enough, so "
        "there the claim is one of memory, not of time: DT-FM cannot run at all.",
        (
            "model", "devices", "PS card", "DT-FM as", "DT-FM s", "DT-FM fits", "DT-FM's setting",
            *OURS, "cleave fits",
        ),
        rows,
        trials,
    )  # fmt: skip


def uses_more_devices(evidence: Evidence, places: int) -> Claim:
    """Test the claim that Cleave can use 2-8x more devices than the baselines.

    `places` is the maximum number of devices that a pipeline can use: layers times samples per
    batch.
    """
    curves: dict[tuple[str, str], list[tuple[int, Outcome]]] = {}
    for card, count, found in evidence.by_card(evidence.model):
        for name, outcome in found.items():
            curves.setdefault((name, card), []).append((count, outcome))
    last = {key: _useful(points) for key, points in curves.items()}
    useful = {key: outcome.devices_used if outcome else 0 for key, outcome in last.items()}
    baselines = {n: used for n in _PIPELINES if (used := useful.get((n, UNLIMITED)))}
    largest = max(count for count, _ in evidence.by_count(evidence.model))
    rows, trials = [], []
    for (name, card), final in last.items():
        if name not in (*OURS, *_PIPELINES):
            continue
        mine, ours = useful[name, card], name in OURS
        if ours:
            ratios = {other: mine / used for other, used in baselines.items()}
            trials += [
                ClaimTrial(name, largest, other, card, evidence.model, ratio >= 2, ratio or None)
                for other, ratio in ratios.items()
            ]
        rows.append(
            (
                name, card if ours else "none",
                str(max(o.devices_used for _, o in curves[name, card])), str(mine),
                _times(useful["cleave", UNLIMITED] / mine) if mine else "-",
                _fits(final) if final else "no plan",
            )
        )  # fmt: skip
    return Claim(
        "2-8 times more devices than the baselines",
        "2x or more",
        "Useful are the devices at work in the largest fleet simulated that is at least 10 % "
        "faster than the one before it; the memory is what the method needs then. Pipelines have "
        f"work for layers x batch devices at most ({places} here); on slow links fewer are as "
        "fast. Behind a card with a limit so are fewer for tiles.",
        (
            "method", "PS card", "most devices used", "useful devices",
            "useful to cleave with an unlimited card, over it", "fits",
        ),
        rows,
        trials,
    )  # fmt: skip


def comparable_to_cloud(evidence: Evidence) -> Claim:
    """Test the claim that Cleave is about as fast as a cloud GPU."""
    rows, trials = [], []
    for model, results in evidence.rows.items():
        alone = (row.outcome for row in results if row.devices is None)
        clouds = {o.method: o for o in alone if o.fits}
        for card, count, found in evidence.by_card(model):
            for name in OURS:
                if name not in found or not math.isfinite(found[name].step_s):
                    continue
                mine = found[name]
                ratios = {n: mine.step_s / cloud.step_s for n, cloud in clouds.items()}
                trials += [
                    ClaimTrial(
                        name, count, n, card, model, mine.fits and ratio <= _COMPARABLE, ratio
                    )
                    for n, ratio in ratios.items()
                ]
                over = ", ".join(f"{n} {_times(ratio)}" for n, ratio in ratios.items())
                rows.append(
                    (
                        model, str(count), card, name, _seconds(mine.step_s), _fits(mine),
                        f"{mine.ps_egress_bytes_per_s * 8e-9:.3g}",
                        f"{mine.ps_ingress_bytes_per_s * 8e-9:.3g}", over,
                    )
                )  # fmt: skip
    return Claim(
        "As fast as a cloud GPU",
        f"{_COMPARABLE:g}x its time or less",
        "The last column is our time over the cloud's, for every cloud on which the model fits "
        f"(with the optimizer on its host where it must be); up to {_COMPARABLE:g}x counts as "
        "comparable. PS out and in are what the parameter server's card carries in the busiest "
        "part of the step; common cards carry 10 to 400 Gbit/s.",
        (
            "model", "devices", "PS card", "method", "s", "fits", "PS out Gbit/s", "PS in Gbit/s",
            "over the cloud's time",
        ),
        rows,
        trials,
    )  # fmt: skip


def recovers_faster(evidence: Evidence) -> Claim:
    """Test the claim that Cleave recovers from a device loss at least 100x faster than others."""
    rows, trials = [], []
    for model in evidence.rows:
        for count, found in evidence.by_count(model):
            others = [
                (name, other.recovery_s, _fits(other))
                for name, other in found.items()
                if name not in OURS and other.recovery_s is not None
            ]
            for method in OURS:
                mine = found.get(method)
                if mine is None or not mine.recovery_s:
                    continue
                ours = mine.recovery_s
                against = list(others)
                if model in evidence.layers:
                    layer_s = mine.step_s / evidence.layers[model]
                    against.append((f"a layer of {method} again", layer_s, _fits(mine)))
                for name, theirs, fits in against:
                    bare, noticed = theirs / ours, (theirs + DETECTION_S) / (ours + DETECTION_S)
                    trials += [
                        ClaimTrial(method, count, what, UNLIMITED, model, ratio >= 100, ratio)
                        for what, ratio in (
                            ("the bare recovery", bare),
                            ("detection included", noticed),
                        )
                    ]
                    rows.append(
                        (
                            model, str(count), method, name, _seconds(theirs), fits, _seconds(ours),
                            _fits(mine), _times(bare), _times(noticed),
                        )
                    )  # fmt: skip
    return Claim(
        "At least 100 times faster recovery from the failure of a device",
        "100x or more",
        f"From when a loss is noticed, and with {DETECTION_S:g} s until it is noticed. Tiles: the "
        "lost device's largest one is done again. Stages: half of the lost device's micro-batches "
        "are, by the others of its stage or by one that is sent the weights. The others restart "
        "from a checkpoint, replay their pipeline or divide the lost samples; the last row of each "
        "does the whole layer again, as systems without blocks would. Detection is the larger part "
        "of a tile's recovery. The fleet has no latency: with any, a tile again takes at least two "
        "of them, and the largest ratios shrink.",
        (
            "model", "devices", "method", "against", "its recovery s", "it fits", "ours s",
            "ours fits", "ratio", "with detection",
        ),
        rows,
        trials,
    )  # fmt: skip


def bytes_fall(evidence: Evidence) -> Claim:
    """Test the claim that each device's traffic decreases as the number of devices grows."""
    rows, trials = [], []
    for name in OURS:
        by_count = evidence.by_count(evidence.model)
        points = [(count, found[name]) for count, found in by_count if name in found]
        points = [(count, o) for count, o in points if math.isfinite(o.step_s)]
        for (before, few), (after, many) in pairwise(points):
            falls = (few.download_bytes, few.upload_bytes), (many.download_bytes, many.upload_bytes)
            down, up = (_slope(a, b, before, after) for a, b in zip(*falls, strict=True))
            trials += [
                ClaimTrial(name, after, way, UNLIMITED, evidence.model, slope < 0, slope)
                for way, slope in (("bytes down", down), ("bytes up", up))
            ]
            rows.append(
                (name, f"{before} to {after}", f"{many.download_bytes / 1e9:.3g}", f"{down:.2f}",
                 f"{many.upload_bytes / 1e9:.3g}", f"{up:.2f}", _fits(many))
            )  # fmt: skip
    return Claim(
        "Bytes for each device fall as devices join",
        "slope below 0",
        "Slopes are of log bytes against log devices: -0.5 down and -1 up is what two-dimensional "
        "tiles give. The bytes through the parameter server grow all the same.",
        ("method", "devices", "GB down", "slope", "GB up", "slope", "fits"),
        rows,
        trials,
        unit="",
    )


def fits_small_memory(evidence: Evidence) -> Claim:
    """Test the claim that Cleave's methods fit in 512 MB of memory per device."""
    rows, trials = [], []
    for row in evidence.small:
        o, count = row.outcome, row.devices or 0
        needed_mb = o.memory_needed_bytes / 1e6 or None
        rows.append((str(count), o.method, _seconds(o.step_s), o.misfit or _fits(o)))
        trials.append(ClaimTrial(o.method, count, "", UNLIMITED, evidence.model, o.fits, needed_mb))
    return Claim(
        "Fits phones with 512 MB to spare",
        "512 MB or less",
        f"{evidence.model} on the same devices, but 512 MB each.",
        ("devices", "method", "s", "fits"),
        rows,
        trials,
        unit=" MB",
    )


def faster_with_memory(evidence: Evidence) -> Claim:
    """Test the claim that Cleave is 4-10x faster than pipelines on devices with 32 GB of memory."""
    (count, found), *_ = _by_count(evidence.roomy)
    ours = {name: found[name].step_s for name in OURS if name in found}
    rows, trials = [], []
    for name, other in found.items():
        ratios = {mine: other.step_s / step_s for mine, step_s in ours.items()}
        if name in _PIPELINES:
            trials += [
                ClaimTrial(mine, count, name, UNLIMITED, evidence.model, ratio >= 4, ratio or None)
                for mine, ratio in ratios.items()
            ]
        rows.append(
            (name, str(other.devices_used), _seconds(other.step_s), _fits(other), other.setting,
             *(_times(ratios.get(mine, 0.0)) for mine in OURS))
        )  # fmt: skip
    fitting = [n for n in _PIPELINES if n in found and found[n].fits]
    reading = "No pipeline fits even then."
    if fitting:
        best = min(fitting, key=lambda n: found[n].step_s)
        reading = (
            f"{len(fitting)} of the others fit now; the fastest is {best} with "
            f"{_seconds(found[best].step_s)} s on {found[best].devices_used} devices, "
            f"{_times(ours['cleave'] / found[best].step_s)} faster than tiles on {count}."
        )
    return Claim(
        "4-10 times less time than pipelines, if every device had 32 GB",
        "4x or more",
        f"{evidence.model} on {count} devices that are the same but for 32 GB of memory in each. "
        f"{reading} The last columns are the row's time over ours.",
        ("method", "devices used", "s", "fits", "setting", *OURS),
        rows,
        trials,
    )


def _useful(points: Sequence[tuple[int, Outcome]]) -> Outcome | None:
    """Return the outcome of the largest useful fleet; None if no fleet has a plan.

    A fleet is useful if its step takes less than 90 % of the next smaller fleet's step time. The
    smallest fleet with a plan is always useful.
    """
    best = next((o for _, o in points if math.isfinite(o.step_s)), None)
    for (_, few), (_, many) in pairwise(points):
        if many.step_s < _WORTH_IT * few.step_s:
            best = many
    return best


def _slope(few_bytes: float, many_bytes: float, few: int, many: int) -> float:
    return math.log(many_bytes / few_bytes) / math.log(many / few)


def _seconds(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _times(value: float) -> str:
    """Format a ratio, such as "4.2x"; "-" for 0, which means no plan."""
    return f"{figure(value)}x" if value else "-"


def _fits(outcome: Outcome) -> str:
    """Format whether a method fits and, if known, how much memory a device needs and offers."""
    if not outcome.memory_needed_bytes:
        return "yes" if outcome.fits else "no"
    needed_gb, offered_gb = outcome.memory_needed_bytes / 1e9, outcome.memory_offered_bytes / 1e9
    return f"{'yes' if outcome.fits else 'no'}: needs {needed_gb:.3g} of {offered_gb:.3g} GB"
