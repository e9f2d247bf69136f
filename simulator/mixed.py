"""`cleave-mixed`: resident sub-layers and tiles together, as memory allows. Not built: simulated.

A step goes through the model's sub-layers from the first to the last and back. They are cut into
consecutive pieces, each of which is one of

    tiles       a single sub-layer by tiles and tasks (`tiles`), on the whole fleet;
    a stretch   sub-layers that are resident at the same time (`resident_layouts`). All samples go
                through it before the next piece begins. Then its weights are replaced by those of
                the next piece, and fetched again when the samples come back: two visits. The last
                piece needs one visit only, as samples go forward and backward in it.

So a fleet whose memory holds a third of the model goes through it in three stretches. A fleet whose
memory holds no FFN keeps attention resident and does the FFNs by tiles. Let t(kind) be the seconds
of a sub-layer by tiles, s(i, l) those of a stretch of l sub-layers from the i-th on in two visits,
and e(i) those of a stretch from the i-th to the end in one visit, all in closed form. Then the best
pieces from the i-th on take

    T(i) = min(t(kind of i) + T(i + 1),  min over l of s(i, l) + T(i + l),  e(i)),      T(2 L) = 0

Lengths l are those that cut the model evenly, the longest that fits, and the rest at the end.
`cleave` and `cleave-resident` are special cases: all tiles, and one stretch. The best ways, of all
lengths together and of one length each, are then simulated event by event; if `cleave` or
`cleave-resident` is faster, that is taken. The LM head is done by tiles. There are two rows:
events, and closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from cleave.errors import PlanError
from simulator.method import Conditions, Outcome, Part, UnderLosses, impossible
from simulator.resident import Resident, best_resident, recovery, resident_row, simulated
from simulator.resident_layouts import ONE_VISIT, TWO_VISITS, LayoutSearch, Stretch
from simulator.sublayers import Kind, kinds
from simulator.tiles import Share, TiledStep, tiled_outcome, tiled_step

_SIMULATED: Final = 8  # layouts of each stretch
_WAYS: Final = 6  # through the model


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces that a model is cut into.

    Attributes:
        tiled: kinds of the sub-layers that are done by tiles.
        stretches: the best layouts of each stretch, ranked by the closed form.
        time_s: seconds by the closed form, without the LM head.
    """

    tiled: tuple[Kind, ...]
    stretches: tuple[tuple[Stretch, ...], ...]
    time_s: float


class PieceSearch:
    """The search for the best pieces: the dynamic program of the module's docstring.

    Args:
        by_tiles_s: t of each kind of sub-layer; infinite if it fits no device.
    """

    def __init__(self, conditions: Conditions, by_tiles_s: Mapping[Kind, float]) -> None:
        self._order = kinds(conditions.spec)
        self._by_tiles_s = by_tiles_s
        self._layouts = LayoutSearch(conditions)
        self._known: dict[tuple[Kind, int, bool], tuple[Stretch, ...]] = {}
        count = len(self._order)
        fitting = (n for n in range(count, 0, -1) if self._layouts.fits(self._order[:n]))
        lengths = {-(-count // parts) for parts in range(1, count + 1)} | {next(fitting, 1)}
        self.lengths = sorted(lengths)

    def ranked(self, most: int) -> list[Pieces]:
        """Return the best pieces of all lengths and of one length each, fastest first."""
        found = [self.best(self.lengths), *(self.best([length]) for length in self.lengths)]
        distinct = {(each.tiled, each.stretches): each for each in found}
        return sorted(distinct.values(), key=lambda each: each.time_s)[:most]

    def best(self, lengths: Sequence[int]) -> Pieces:
        """Return the pieces of the least T(0).

        Args:
            lengths: allowed lengths of stretches, ascending; the last one may be shorter.
        """
        count = len(self._order)
        best: list[Pieces] = [Pieces((), (), 0.0)]  # from the i-th on, last first
        for start in reversed(range(count)):
            rest, kind = best[-1], self._order[start]
            tiled_s = self._by_tiles_s[kind] + rest.time_s
            found = Pieces((kind, *rest.tiled), rest.stretches, tiled_s)
            left = count - start
            for length in {*(n for n in lengths if n <= left), min(left, lengths[-1])}:
                ranked = self._stretches(start, length)
                rest = best[left - length]
                if ranked and ranked[0].time_s + rest.time_s < found.time_s:
                    time_s = ranked[0].time_s + rest.time_s
                    found = Pieces(rest.tiled, (ranked, *rest.stretches), time_s)
            best.append(found)
        return best[-1]

    def _stretches(self, start: int, length: int) -> tuple[Stretch, ...]:
        last = start + length == len(self._order)
        key = self._order[start], length, last
        if key not in self._known:
            order, visits = self._order[start : start + length], ONE_VISIT if last else TWO_VISITS
            found = self._layouts.best_first(order, visits, coarse=True)
            self._known[key] = tuple(found[:_SIMULATED])
        return self._known[key]


@dataclass(frozen=True, slots=True)
class MixedLosses:
    """The time of a step with losses: the sum of its pieces' times."""

    pieces: tuple[UnderLosses, ...]

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """See `UnderLosses.with_losses_s`."""
        return math.fsum(p.with_losses_s(losses_per_s, detection_s) for p in self.pieces)


class CleaveMixed:
    """Resident sub-layers, and tiles for what does not fit."""

    name = "cleave-mixed"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return two rows: events, closed form."""
        try:
            step = conditions.once(tiled_step)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        tiles = tiled_outcome(self.name, step)
        by_tiles = {kind: step.sublayer(kind) for kind in Kind}
        search = PieceSearch(conditions, {kind: s.seconds for kind, s in by_tiles.items()})
        ways = search.ranked(_WAYS)
        if not any(pieces.stretches for pieces in ways):
            tiles = replace(tiles, setting="all by tiles")
            return [tiles, replace(tiles, method=f"{self.name} (closed form)")]
        rows = [tiles]
        resident = conditions.once(best_resident)
        if resident is not None:
            rows.append(resident_row(self.name, conditions, resident))
        once: dict[tuple[Stretch, ...], Resident | None] = {}
        for pieces in ways:
            for ranked in pieces.stretches:
                if ranked not in once:
                    once[ranked] = simulated(conditions, ranked)
            found = [once[ranked] for ranked in pieces.stretches]
            known = [each for each in found if each is not None]
            if known and len(known) == len(found):
                rows.append(_outcome(self.name, conditions, step, pieces, known))
        best = min(rows, key=lambda row: row.step_s)
        if best is tiles:
            best = replace(best, setting="all by tiles")
        name = f"{self.name} (closed form)"
        return [best, _closed_form(name, conditions, step, ways[0], best)]


def _setting(pieces: Pieces, layouts: Sequence[Stretch]) -> str:
    runs = []
    for stretch, alike in groupby(layouts):
        number, layout = len(list(alike)), stretch.layout
        longest = max(len(held.run) for held in layout.stages)
        stages = f"{len(layout.stages)} stages of {longest} sub-layers, groups of {layout.r}"
        runs.append(f"{number} x {stages}" if number > 1 else stages)
    tiled = [f"{len(pieces.tiled)} sub-layers by tiles"] if pieces.tiled else []
    return "; then ".join(runs + tiled)


def _tiles(step: TiledStep, pieces: Pieces) -> Share:
    shares = [step.sublayer(kind).times(pieces.tiled.count(kind)) for kind in set(pieces.tiled)]
    return Share(*(math.fsum(column) for column in zip(*shares, step.edges(), strict=True)))


def _outcome(
    name: str, conditions: Conditions, step: TiledStep, pieces: Pieces, found: Sequence[Resident]
) -> Outcome:
    by_tiles, edges = _tiles(step, pieces), step.edges()
    moved = [each.moved_bytes(conditions.batch) for each in found]
    samples_s = math.fsum(each.samples_s for each in found)
    gradients_s = math.fsum(each.time_s for each in found) - samples_s
    used = max(each.assignment.devices for each in found)
    if pieces.tiled:
        used = len(conditions.devices)
    memory = conditions.rates.memory
    holds = [step.tightest_bytes()] if pieces.tiled else []
    for each in found:
        needed = each.stretch.layout.needed_bytes
        holds.append((needed, float(memory[memory >= needed].min())))
    needed, offered = max(holds, key=lambda pair: pair[0] / pair[1])
    peak_out, peak_in = step.peaks_bytes_per_s
    losses = [each.losses(conditions) for each in found]
    return Outcome(
        method=name,
        setting=_setting(pieces, [each.stretch for each in found]),
        devices_used=used,
        parts=(
            Part("sub-layers", samples_s),
            Part("last gradients", gradients_s),
            Part("tiles", by_tiles.seconds - edges.seconds),
            Part("LM head", edges.seconds),
        ),
        download_bytes=(by_tiles.download_bytes + sum(down for down, _ in moved)) / used,
        upload_bytes=(by_tiles.upload_bytes + sum(up for _, up in moved)) / used,
        memory_offered_bytes=offered,
        memory_needed_bytes=needed,
        ps_egress_bytes_per_s=max(peak_out, *_rates(found, [down for down, _ in moved])),
        ps_ingress_bytes_per_s=max(peak_in, *_rates(found, [up for _, up in moved])),
        recovery=max(map(recovery, losses), key=lambda parts: sum(p.seconds for p in parts)),
        under_losses=MixedLosses((step.losses(pieces.tiled), *losses)),
    )


def _rates(found: Sequence[Resident], nbytes: Sequence[float]) -> list[float]:
    return [moved / each.time_s for each, moved in zip(found, nbytes, strict=True)]


def _closed_form(
    name: str, conditions: Conditions, step: TiledStep, pieces: Pieces, like: Outcome
) -> Outcome:
    """Return the row of the best pieces in closed form; bytes and memory are those of `like`."""
    by_tiles, edges = _tiles(step, pieces), step.edges()
    first = [ranked[0] for ranked in pieces.stretches]
    visits = [visit for stretch in first for visit in stretch.visits]
    return replace(
        like,
        method=name,
        setting=_setting(pieces, first),
        parts=(
            Part("steady state", math.fsum(visit.steady_s for visit in visits)),
            Part("fill", math.fsum(visit.fill_s for visit in visits)),
            Part("last gradients", math.fsum(visit.flush_s for visit in visits)),
            Part("tiles", by_tiles.seconds - edges.seconds),
            Part("LM head", edges.seconds),
        ),
        recovery=(),
        under_losses=None,
    )
