"""Graphs kept on disk: found again, made anew when damaged, never in the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from cleave.graphs.graph_cache import GraphCache


@dataclass(frozen=True)
class _Kept:
    graph: bytes
    names: tuple[str, ...]


def test_the_cache_returns_what_was_made_until_it_is_damaged(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> _Kept:
        made.append("made")
        return _Kept(b"\x00\xff", ("a", "b"))

    cache = GraphCache(tmp_path / "graphs")
    assert cache.get("ab12", _Kept, make) == cache.get("ab12", _Kept, make) == make()
    assert len(made) == 2  # once by the cache
    (path,) = (tmp_path / "graphs").glob("*.graphs")
    for damaged in (b"", b"\xc1", path.read_bytes()[:-3], b"\x81\xa5graph\x01"):
        path.write_bytes(damaged)
        before = len(made)
        assert cache.get("ab12", _Kept, make).graph == b"\x00\xff"
        assert len(made) == before + 1


def test_a_cache_that_cannot_be_written_makes_graphs_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = GraphCache(tmp_path / "file" / "graphs")
    assert cache.get("ab", _Kept, lambda: _Kept(b"1", ())).graph == b"1"


def test_of_several_that_want_the_same_one_makes_it(tmp_path: Path) -> None:
    made: list[str] = []
    begun, go_on = Event(), Event()

    def make() -> _Kept:
        made.append("made")
        begun.set()
        go_on.wait()
        return _Kept(b"1", ())

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(GraphCache(tmp_path).get, "ab", _Kept, make)
        begun.wait()
        second = pool.submit(GraphCache(tmp_path).get, "ab", _Kept, make)
        go_on.set()
        assert first.result() == second.result() == _Kept(b"1", ())
    assert made == ["made"]
