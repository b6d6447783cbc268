"""The product's version, in one place, and the commit that it was built from.

The distribution's metadata reads the version too.  A distribution has its commit in a file that is written when it is
built (`scripts/build_commit.py`); a checkout is asked for what it has checked out.  Only the text of git's files is
read: no program is started, and nothing here can fail.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Final

VERSION = "0.1.0"
COMMIT_FILE: Final = "commit.txt"
"""Beside this module, in a distribution."""
UNKNOWN: Final = "unknown"
_HASH: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHOWN_DIGITS: Final = 12


@cache
def commit() -> str:
    """Return the commit that runs, 12 hex digits; UNKNOWN if nothing says it."""
    here = os.path.dirname(os.path.abspath(__file__))
    found = _text(here, COMMIT_FILE) or commit_of(os.path.dirname(here))
    return found[:_SHOWN_DIGITS] if _HASH.fullmatch(found) else UNKNOWN


def version_text() -> str:
    """Return the version with its commit: `0.1.0 (commit 1a2b3c4d5e6f)`."""
    return f"{VERSION} (commit {commit()})"


def commit_of(checkout: str) -> str:
    """Return the hash of the commit that a git checkout is at; empty if the folder is none."""
    git = os.path.join(checkout, ".git")
    link = _text(checkout, ".git").partition("gitdir:")[2].strip()  # of a worktree
    if link:
        git = os.path.join(checkout, link)
    head = _text(git, "HEAD")
    ref = head.partition("ref:")[2].strip()
    if not ref:
        return head if _HASH.fullmatch(head) else ""
    common = os.path.join(git, _text(git, "commondir") or ".")
    found = _text(git, ref) or _text(common, ref)
    if not found:
        packed = (line.partition(" ") for line in _text(common, "packed-refs").splitlines())
        found = next((commit_hash for commit_hash, _, name in packed if name == ref), "")
    return found if _HASH.fullmatch(found) else ""


def _text(*path: str) -> str:
    """Return the text of a file, without white space at its ends; empty if it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return ""
