"""A GEMM as a scheduler job: the tasks of its plan, and the order of its partial sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, Final

from cleave.errors import PlanError
from cleave.gemm import Gemm, Span, Tile, TileCut, boxes_of, even_cuts, wavefront
from cleave.planner.coding import coded_ratio, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PartPlanner, Plan, Planner, Residency
from cleave.protocol import limits
from cleave.scheduler.tiles.device_memory import DeviceMemory
from cleave.scheduler.tiles.tasks import ArrayRef, GemmTask, Task

# Plans for larger fleets ignore the arrays that devices hold, because comparisons take too long.
RESIDENCY_DEVICES: Final = 64
_BLOCK_BYTES = 8 * 2**20
_PARTIAL = "fp32"  # partial sums are sent and added in fp32


@dataclass(frozen=True, slots=True)
class MatrixRef:
    """One input matrix of a GEMM: an operand, as stored or transposed."""

    operand: int
    transposed: bool

    def region(self, rows: Span, columns: Span) -> tuple[Span, Span]:
        """Convert a region of the GEMM's matrix to the rows and columns of the stored operand."""
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(slots=True)
class TileProgress:
    """The progress of one tile."""

    device: int  # the planned device. If it is late or lost, other devices compute some blocks.
    tile: Tile
    blocks: int = 0  # number of the tile's blocks, without blocks that were moved to other tiles
    done: int = 0  # number of the tile's blocks whose results have arrived


@dataclass(eq=False)
class GemmJob:
    """A scheduler job that computes C = A @ B on a fleet.

    Attributes:
        tiles: maps a tile number to the tile's progress; empty until the job is assigned.
    """

    id: int
    gemm: Gemm
    a: MatrixRef
    b: MatrixRef
    element: ElementBytes
    dtype: str
    out: str
    planner: Planner
    plan: Plan | None = field(init=False, default=None)
    tiles: dict[int, TileProgress] = field(init=False, default_factory=dict)
    # proposed tiles
    _repartitioned_tiles: dict[int, TileProgress] = field(init=False, default_factory=dict)
    _remaining: int = field(init=False, default=0)
    _tiles: int = field(init=False, default=0)  # tile numbers used so far
    _order: ReductionOrder | None = field(init=False, default=None)

    @property
    def title(self) -> str:
        """Return a display name: the shapes of A and B, such as `64×32 · 32×16`."""
        m, n, k = self.gemm.m, self.gemm.n, self.gemm.k
        return f"{m}×{k} · {k}×{n}"

    @property
    def complete(self) -> bool:
        """Return whether the results of all blocks have been released for writing."""
        return self.plan is not None and not self._remaining

    def runs_on(self, device: DeviceRates) -> bool:
        """Return whether a device supports the dtype of the job's tasks."""
        return self.dtype in device.dtypes

    def assign(
        self, devices: Sequence[DeviceRates], device_memory: DeviceMemory
    ) -> Iterable[tuple[int, Task]]:
        """Plan the job and return (device, task) pairs, with each device's tasks in sending order.

        Raises:
            PlanError: if the GEMM cannot be planned on these devices.
        """
        residencies = list(self._residencies(device_memory, len(devices)))
        of_payloads = payload_rates(devices, self.dtype)
        self.plan = self.planner.plan(self.gemm, self.element, of_payloads, residencies)
        assigned = []
        for number, tile in enumerate(self.plan.tiles):
            self.tiles[number] = TileProgress(tile.device, tile.tile)
            tasks = self._tasks(tile.cut, number, device_memory)
            assigned += [(tile.device, task) for task in tasks]
        self._remaining, self._tiles = len(assigned), len(self.plan.tiles)
        self._count(task for _, task in assigned)
        if partial := [task for _, task in assigned if task.gemm.partial]:
            self._order = ReductionOrder(partial)
        return assigned

    def _count(self, tasks: Iterable[Task], each: int = 1) -> None:
        for task in tasks:
            self.tiles[task.gemm.tile].blocks += each

    def _tasks(self, cut: TileCut, number: int, device_memory: DeviceMemory) -> Iterator[Task]:
        """Yield one task for each block of a tile, in wavefront order."""
        partial = cut.tile.is_partial(self.gemm)
        each = self.element.partial if partial else self.element.finished
        out = _PARTIAL if partial else self.out
        ratios = coded_ratio(self.dtype), coded_ratio(out)
        a_strips = {m: [self._a(device_memory, m, k) for k in cut.k_cuts] for m in cut.m_cuts}
        b_strips = {n: [self._b(device_memory, k, n) for k in cut.k_cuts] for n in cut.n_cuts}
        for block in wavefront(cut):
            pieces = zip(a_strips[block.m], b_strips[block.n], strict=True)
            yield Task(
                self.id,
                tuple(piece for pair in pieces for piece in pair),
                block.flops,
                block.elements * each,
                GemmTask(block, number, self.a.transposed, self.b.transposed, partial, out),
                *ratios,
            )

    def _a(self, device_memory: DeviceMemory, m: Span, k: Span) -> ArrayRef:
        return device_memory.array_of(self.a.operand, *self.a.region(m, k), self.element.sent)

    def _b(self, device_memory: DeviceMemory, k: Span, n: Span) -> ArrayRef:
        return device_memory.array_of(self.b.operand, *self.b.region(k, n), self.element.sent)

    # --- repartitioning ---

    @property
    def expected_s(self) -> float | None:
        """Return the GEMM's predicted total time in seconds; None before the job is assigned."""
        return None if self.plan is None else self.plan.makespan_s + self.plan.fill_s

    def repartition(
        self,
        tasks: Sequence[Task],
        devices: Sequence[DeviceRates],
        busy_s: Mapping[int, float],
        device_memory: DeviceMemory,
    ) -> tuple[list[tuple[int, Task]], float] | None:
        """Propose new tasks that compute the same elements. To accept them, call `replace`.

        Unfinished blocks are grouped into boxes, and each box is planned as a separate GEMM.

        Args:
            tasks: tasks of this job that no device has answered.
            busy_s: maps a device to the predicted remaining time of its tasks, in seconds.

        Returns:
            (device, task) pairs, and the predicted time from now until the last task finishes, in
            seconds; None if no plan is possible.
        """
        assigned: list[tuple[int, Task]] = []
        finish_s = 0.0
        self._repartitioned_tiles = {}
        planned_s, number = 0.0, self._tiles
        for box in boxes_of([task.gemm.block for task in tasks]):
            gemm = Gemm(box.m.size, box.n.size, box.k.size)
            partial = box.is_partial(self.gemm)
            finished = self.element.partial if partial else self.element.finished
            element = ElementBytes(self.element.sent, finished, self.element.partial)
            try:
                plan = self._part(gemm, element, devices)
            except PlanError:
                return None
            # Boxes run one after another, after the devices' current tasks.
            planned_s += plan.makespan_s + plan.fill_s
            for tile in plan.tiles:
                cut = _moved(tile.cut, box)
                finish_s = max(finish_s, busy_s[tile.device] + planned_s)
                assigned += [(tile.device, u) for u in self._tasks(cut, number, device_memory)]
                self._repartitioned_tiles[number] = TileProgress(tile.device, cut.tile)
                number += 1
        return assigned, finish_s

    def _part(self, gemm: Gemm, element: ElementBytes, devices: Sequence[DeviceRates]) -> Plan:
        planner = self.planner
        plan = planner.plan_part if isinstance(planner, PartPlanner) else planner.plan
        return plan(gemm, element, payload_rates(devices, self.dtype))

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Replace tasks with the tasks of the latest proposal from `repartition`."""
        self._remaining += len(others) - len(tasks)
        self._tiles = 1 + max(task.gemm.tile for task in others)
        self.tiles |= self._repartitioned_tiles
        self._count(tasks, -1)
        self._count(others)
        self.tiles = {number: tile for number, tile in self.tiles.items() if tile.blocks}
        if self._order is not None:
            self._order.replace(tasks, others)
        elif partial := [task for task in others if task.gemm.partial]:
            self._order = ReductionOrder(partial)

    # --- results ---

    def arrived(self, task: Task, payload: Any) -> Iterable[tuple[Task, Any]]:
        """Record a result. Return the results that may be written now, in order."""
        self.tiles[task.gemm.tile].done += 1
        ready = [(task, payload)]
        if self._order is not None and task.gemm.partial:
            ready = self._order.arrived(task, payload)
        self._remaining -= len(ready)
        return ready

    # --- operands that devices hold ---

    def _residencies(self, device_memory: DeviceMemory, fleet: int) -> Iterator[Residency]:
        """Yield tilings in which each device already holds its tile's inputs from A or from B."""
        if fleet > RESIDENCY_DEVICES:
            return
        held_a = device_memory.holders(self.a.operand)
        held_b = device_memory.holders(self.b.operand)
        whole = Tile(Span(0, self.gemm.m), Span(0, self.gemm.n), Span(0, self.gemm.k))
        for held in (held_a, held_b):
            tiles = {}
            for device in held:
                cut_a = _grid(held_a.get(device, ()), self.a.transposed)
                cut_b = _grid(held_b.get(device, ()), self.b.transposed)
                cut = self._follow(whole, cut_a, cut_b, follow_a=held is held_a)
                if cut is None:
                    break
                tiles[device] = cut
            else:
                if tiles and _covers(self.gemm, [cut.tile for cut in tiles.values()]):
                    yield Residency(tiles, self._held_bytes(tiles, held_a, held_b))

    def _follow(
        self, whole: Tile, cut_a: _Grid | None, cut_b: _Grid | None, *, follow_a: bool
    ) -> TileCut | None:
        """Return the tile that multiplies the grid that a device holds by the other matrix.

        The grid is part of A if `follow_a` is True, otherwise of B. Return None if the device holds
        no grid, or if a task would have too many inputs.
        """
        grid = cut_a if follow_a else cut_b
        if grid is None:
            return None
        k_cuts = grid.columns if follow_a else grid.rows
        if 2 * len(k_cuts) > limits.MAX_RUN_INPUTS:
            return None
        other = cut_b if follow_a else cut_a
        kept = grid.rows if follow_a else grid.columns
        third = whole.n if follow_a else whole.m
        free: tuple[Span, ...] | None = None
        if other is not None and (other.rows if follow_a else other.columns) == k_cuts:
            cuts = other.columns if follow_a else other.rows
            if _hull(cuts) == third:  # the device also holds all needed parts of the other matrix
                free = cuts
        if free is None:
            block_bytes = max(s.size for s in kept) * third.size * self.element.partial
            free = even_cuts(third, max(1, -(-block_bytes // _BLOCK_BYTES)), align=4)
        m_cuts, n_cuts = (kept, free) if follow_a else (free, kept)
        return TileCut(Tile(_hull(m_cuts), _hull(n_cuts), _hull(k_cuts)), m_cuts, n_cuts, k_cuts)

    def _held_bytes(
        self,
        tiles: Mapping[int, TileCut],
        held_a: Mapping[int, Sequence[ArrayRef]],
        held_b: Mapping[int, Sequence[ArrayRef]],
    ) -> dict[int, int]:
        """Return how many bytes of its tile's inputs each device already holds."""
        total = {}
        for device, cut in tiles.items():
            names_a = {(s.rows, s.columns): s.nbytes for s in held_a.get(device, ())}
            names_b = {(s.rows, s.columns): s.nbytes for s in held_b.get(device, ())}
            total[device] = sum(
                names_a.get(self.a.region(m, k), 0) for m in cut.m_cuts for k in cut.k_cuts
            ) + sum(names_b.get(self.b.region(k, n), 0) for k in cut.k_cuts for n in cut.n_cuts)
        return total


@dataclass(frozen=True, slots=True)
class _Grid:
    """The row spans and column spans of a complete grid of arrays of one matrix."""

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]


def _grid(arrays: Sequence[ArrayRef], transposed: bool) -> _Grid | None:
    """Return the grid of the arrays, in the GEMM's orientation; None without a grid."""
    rows = tuple(sorted({a.rows for a in arrays}))
    columns = tuple(sorted({a.columns for a in arrays}))
    if not arrays or len(arrays) != len(rows) * len(columns):
        return None
    for spans in (rows, columns):
        if any(x.stop != y.start for x, y in pairwise(spans)):
            return None
    return _Grid(columns, rows) if transposed else _Grid(rows, columns)


def _hull(spans: Sequence[Span]) -> Span:
    return Span(spans[0].start, spans[-1].stop)


def _covers(gemm: Gemm, tiles: Sequence[Tile]) -> bool:
    """Return whether tiles cover every part of a GEMM exactly once."""
    if sum(tile.volume for tile in tiles) != gemm.volume:
        return False
    return not any(x.overlaps(y) for i, x in enumerate(tiles) for y in tiles[:i])


def _moved(cut: TileCut, box: Tile) -> TileCut:
    """Convert a tile from the coordinates of a box to the coordinates of the whole GEMM."""

    def moved(spans: Iterable[Span], by: Span) -> tuple[Span, ...]:
        return tuple(Span(s.start + by.start, s.stop + by.start) for s in spans)

    m_cuts, n_cuts = moved(cut.m_cuts, box.m), moved(cut.n_cuts, box.n)
    k_cuts = moved(cut.k_cuts, box.k)
    return TileCut(Tile(_hull(m_cuts), _hull(n_cuts), _hull(k_cuts)), m_cuts, n_cuts, k_cuts)


class ReductionOrder:
    """Releases partial sums in order of increasing k, independently of the order of arrival.

    A partial sum waits for all partial sums of the same output elements at lower k.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waits = dict.fromkeys(tasks, 0)
        self._followers: dict[Task, list[Task]] = {task: [] for task in tasks}
        self._parked: dict[Task, Any] = {}
        # All cuts divide C into cells. In each cell, a task waits for the previous task along k.
        blocks = [task.gemm.block for task in tasks]
        rows = _cells({block.m for block in blocks})
        columns = _cells({block.n for block in blocks})
        latest: dict[tuple[int, int], Task] = {}
        for task in sorted(tasks, key=lambda u: u.gemm.block.k):
            block = task.gemm.block
            cells = list(product(rows[block.m], columns[block.n]))
            before = dict.fromkeys(map(latest.get, cells))
            latest.update(dict.fromkeys(cells, task))
            for lower in before:
                if lower is not None:
                    self._waits[task] += 1
                    self._followers[lower].append(task)

    def replace(self, tasks: Sequence[Task], others: Sequence[Task]) -> None:
        """Replace unanswered tasks with other tasks that compute the same output elements."""
        gone = {task for task in tasks if task in self._waits}
        before, after = [], []
        for task, later in self._followers.items():
            kept = [u for u in later if u not in gone]
            if task not in gone and len(kept) < len(later):
                before.append(task)
                self._followers[task] = kept
        for task in gone:
            del self._waits[task]
            for follower in self._followers.pop(task):
                if follower not in gone:
                    self._waits[follower] -= 1
                    after.append(follower)
        added = dict.fromkeys(task for task in others if task.gemm.partial)
        self._waits |= dict.fromkeys(added, 0)
        self._followers |= {task: [] for task in added}
        around = ReductionOrder([*before, *added, *dict.fromkeys(after)])
        for lower, later in around._followers.items():
            for upper in later:
                if lower in added or upper in added:
                    self._followers[lower].append(upper)
                    self._waits[upper] += 1

    def arrived(self, task: Task, payload: Any) -> list[tuple[Task, Any]]:
        """Record a partial sum. Return the partial sums that may be added now, in order."""
        if self._waits[task]:
            self._parked[task] = payload
            return []
        ready = [(task, payload)]
        for lower, _ in ready:  # `ready` grows in the loop
            for follower in self._followers.pop(lower):
                self._waits[follower] -= 1
                if not self._waits[follower] and follower in self._parked:
                    ready.append((follower, self._parked.pop(follower)))
        return ready


def _cells(spans: Set[Span]) -> dict[Span, range]:
    """Map each span to its range of cells. The cell boundaries are the spans' starts and ends."""
    bounds = sorted({bound for span in spans for bound in span})
    numbers = {bound: number for number, bound in enumerate(bounds)}
    return {span: range(numbers[span.start], numbers[span.stop]) for span in spans}
