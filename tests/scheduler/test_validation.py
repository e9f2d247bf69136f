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


def hold_too_much(books: Books) -> None:
    books.devices[1].rates = DeviceRates(1, 1e6, 1e6, 1e9, memory_bytes=100)


def need_nothing(books: Books) -> None:
    books.devices[1].needed.clear()


def run_without_array(books: Books) -> None:
    del books.devices[1].held[books.array.id]
    books.devices[1].occupied_bytes -= books.array.nbytes


def forget_what_is_held(books: Books) -> None:
    books.devices[1].forget.append(books.array.id)


def drain_with_a_queue(books: Books) -> None:
    books.devices[2].draining = True
    books.devices[2].queue.append(Task(7, (), 1, 1, None))


def run_too_many(books: Books) -> None:
    books.devices[2].running = {run: Task(7, (), 1, 0, None) for run in range(10_000)}


def hold_unknown(books: Books) -> None:
    books.memory.leave(books.devices[1])


def give_it_twice(books: Books) -> None:
    books.memory.retain(books.devices[2], books.task)
    books.devices[2].queue.append(books.task)


def say_copy_of_one(books: Books) -> None:
    books.copies[books.task] = {1}


def keep_back_what_runs(books: Books) -> None:
    books.kept_back.append(books.task)


BROKEN: dict[Callable[[Books], None], str] = {
    book_too_much: "129 bytes are booked, and 128 are occupied",
    hold_too_much: "128 bytes are more than its 100",
    need_nothing: "are booked as needed",
    run_without_array: "runs need the arrays",
    forget_what_is_held: "is to forget them",
    drain_with_a_queue: "1 tasks wait for it",
    run_too_many: "10000 runs are under way",
    hold_unknown: "not among its holders",
    give_it_twice: "with devices [1, 2], and no copy",
    say_copy_of_one: "is said to be with [1]",
    keep_back_what_runs: "is kept back and given to [1]",
}


def test_right_books_are_right() -> None:
    assert Books().problems() == []


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__)
def test_what_is_wrong_is_said(spoil: Callable[[Books], None]) -> None:
    books = Books()
    spoil(books)
    assert BROKEN[spoil] in "; ".join(books.problems())


def test_what_is_kept_back_of_a_job_that_ended_is_said() -> None:
    books = Books()
    books.kept_back.append(Task(9, (), 1, 1, None))
    assert "is kept back, and that has ended" in "; ".join(books.problems())


def test_leftovers_are_said() -> None:
    books = Books()
    found = leftovers(books.devices.values(), {"jobs": [1, 2], "copies": []}, books.memory)
    assert found == [
        "2 jobs are left",
        "arrays are named that nobody will use",
        "device 1 has 3 arrays and tasks left",
    ]
