"""Cells and tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.claims import Verdict


def between(values: Iterable[float]) -> str:
    """Return the range of the ratios as text; empty without ratios."""
    found = sorted(values)
    if not found:
        return ""
    low, high = ratio(found[0]), ratio(found[-1])
    return low if low == high else f"{low} to {high}"


def quantity(value: float) -> str:
    """Return a number with three significant digits; all integer digits from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(claim: tuple[float, float]) -> str:
    """Return the range of a claim as text."""
    return f"{claim[0]:g} to {claim[1]:g}"


def ratio(value: float | None) -> str:
    """Return a ratio as text; "unknown" for None."""
    if value is None:
        return "unknown"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return lines + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    ]


def only_if_text(verdict: Verdict, settings: Mapping[str, str]) -> str:
    """Return a cell with what a claim needs; "-" for a claim that holds always or never."""
    if verdict is not Verdict.SOMETIMES:
        return "-"
    text = "; ".join(f"{name}: {setting}" for name, setting in settings.items())
    return text or "no single condition; see 'One condition at a time'"
