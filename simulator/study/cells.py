"""Formats numbers and Markdown tables for the study's report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.claims import Verdict


def between(values: Iterable[float]) -> str:
    """Format the minimum and maximum of ratios, such as "0.5 to 3"; empty without ratios."""
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
    """Format a ratio with two significant digits, or as an integer from 100 on.

    None becomes "unknown".
    """
    if value is None:
        return "unknown"
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with vertical bars in the cells escaped.

    Args:
        columns: headings.
        rows: one cell per heading for each row.
    """
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return lines + [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    ]


def only_if_text(verdict: Verdict, settings: Mapping[str, str]) -> str:
    """Return a table cell with the conditions under which a claim holds.

    Args:
        verdict: whether the claim holds in all, some or no combinations of conditions. For all
            verdicts but `Verdict.SOMETIMES`, the cell is "-".
        settings: maps a condition to the setting that the claim needs.
    """
    if verdict is not Verdict.SOMETIMES:
        return "-"
    text = "; ".join(f"{name}: {setting}" for name, setting in settings.items())
    return text or "no single condition; see 'One condition at a time'"
