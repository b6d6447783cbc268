"""The versions of a host that a plug-in knows, looked at when it starts.

Hosts change these interfaces between releases.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lakefs.errors import UnsupportedVersion


def check_host(package: str, least: tuple[int, int, int], below: tuple[int, int, int]) -> None:
    """Raise UnsupportedVersion unless the installed package is of a version in [least, below)."""
    known = f"{package} {_text(least)} and later, before {_text(below)}"
    known += f"; install one of those: pip install '{package}>={_text(least)},<{_text(below)}'"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise UnsupportedVersion(f"{package} is not installed; this plug-in knows {known}") from None
    if not least <= parsed(installed) < below:
        raise UnsupportedVersion(f"{package} {installed} is installed; this plug-in knows {known}")


def parsed(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, three of them: `0.5.6.post1` is (0, 5, 6)."""
    numbers: list[int] = []
    for piece in text.split(".")[:3]:
        digits = piece[: next((at for at, letter in enumerate(piece) if not letter.isdigit()), len(piece))]
        if not digits:
            break
        numbers.append(int(digits))
    return (*numbers, 0, 0, 0)[:3]


def _text(numbers: tuple[int, int, int]) -> str:
    return ".".join(map(str, numbers))
