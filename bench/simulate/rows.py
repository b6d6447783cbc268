"""Tables of Markdown, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def seconds(value: float) -> str:
    """Format a time."""
    for limit, unit, text in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if value < limit:
            return f"{three(value * unit)} {text}"
    return f"{three(value / 3600)} h" if value < 200_000 else f"{three(value / 86_400)} days"


def three(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate(bytes_per_s: float) -> str:
    """Format a rate of bytes."""
    return f"{three(bytes_per_s / 1e9)} GB/s" if bytes_per_s < 1e12 else f"{three(bytes_per_s / 1e12)} TB/s"


def size(count: float) -> str:
    """Format a number of bytes of memory."""
    if count < 1 << 20:
        return f"{three(count / 1024)} KiB"
    return f"{three(count / (1 << 20))} MiB" if count < 1 << 30 else f"{three(count / (1 << 30))} GiB"
