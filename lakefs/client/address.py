"""Which engine a client means when it is not told: the environment's, else the configuration's."""

from __future__ import annotations

import os


def resolve(address: str | None, token: str | None) -> tuple[str, str]:
    """Address and token, with what the environment and the configuration say where they are not given."""
    where = address or os.environ.get("LAKE_SERVER") or _configured()
    return where, os.environ.get("LAKE_TOKEN", "") if token is None else token


def _configured() -> str:
    # Imported only here: a command whose engine is named starts sooner without it.
    from lakefs.config import load  # noqa: PLC0415

    return f"unix:{load().socket}"
