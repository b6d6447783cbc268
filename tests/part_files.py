"""Parts as killed gets leave them."""

from __future__ import annotations

from pathlib import Path

from lakefs.get.opened import Piece
from lakefs.ids import data_chunk_id
from lakefs.trees.local_folders import LocalTarget
from lakefs.trees.part_files import PartFile


def opened_part(target: Path) -> PartFile:
    """Return the part of a get that is running."""
    part = PartFile(LocalTarget.at(str(target)))
    part.open()
    return part


def piece_of(content: bytes, offset: int = 0) -> Piece:
    """Return a piece of an object."""
    return Piece(data_chunk_id(content), offset, len(content))


def left_part(target: Path, content: bytes) -> Path:
    """Return the part of a get that was killed when it had written this content."""
    part = opened_part(target)
    part.set_length(len(content))
    part.deliver(piece_of(content), memoryview(content))
    part.keep()
    return target.parent / part.part_name
