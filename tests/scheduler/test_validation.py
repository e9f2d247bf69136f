"""Books that are wrong are told: each of the invariants, broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cleave.gemm import Span
from cleave.planner.plan import DeviceRates
from cleave.scheduler.tiles.device_memory import DeviceMemory, Names
from cleave.scheduler.tiles.load import DeviceLoad
from cleave.scheduler.tiles.tasks import Task
from cleave.scheduler.tiles.validation import broken_invariants, leftovers


class Books:
    """Two devices; the first runs a task of one array."""

    def __init__(self) -> None:
        self.memory = DeviceMemory(Names(), list)
        self.array = self.memory.array_of(1, Span(0, 4), Span(0, 4), 4)
        self.task = Task(7, (self.array,), 128, 64, None)
        self.devices = {
            id: DeviceLoad(DeviceRates(id, 1e6, 1e6, 1e9, memory_bytes=200)) for id in (1, 2)
        }
        first = self.devices[1]
        self.memory.retain(first, self.task)
        first.held[self.array.id] = self.array
        first.occupied_bytes = self.array.nbytes
        first.asked(5, self.task, self.array.nbytes, 0.0)
        self.copies: dict[Task, set[int]] = {}
        self.kept_back: list[Task] = []

    def problems(self) -> list[str]:
        return broken_invariants(self.devices, {}, self.copies, self.kept_back, self.memory)


def book_too_much(books: Books) -> None:
    books.devices[1].occupied_bytes += 1


def run_without_array(books: Books) -> None:
    del books.devices[1].held[books.array.id]
    books.devices[1].occupied_bytes -= books.array.nbytes


def give_it_twice(books: Books) -> None:
    books.memory.retain(books.devices[2], books.task)
    books.devices[2].queue.append(books.task)


def keep_back_what_runs(books: Books) -> None:
    books.kept_back.append(books.task)


BROKEN: dict[Callable[[Books], None], str] = {
    book_too_much: "129 bytes are booked, and 128 are occupied",
    run_without_array: "runs need the arrays",
    give_it_twice: "with devices [1, 2], and no copy",
    keep_back_what_runs: "is kept back and given to [1]",
}


def test_right_books_are_right() -> None:
    assert Books().problems() == []


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_said(spoil: Callable[[Books], None]) -> None:
    books = Books()
    spoil(books)
    assert BROKEN[spoil] in "; ".join(books.problems())


def test_leftovers_are_said() -> None:
    books = Books()
    found = leftovers(books.devices.values(), {"jobs": [1, 2], "copies": []}, books.memory)
    assert found == [
        "2 jobs are left",
        "arrays are named that nobody will use",
        "device 1 has 3 arrays and tasks left",
    ]
