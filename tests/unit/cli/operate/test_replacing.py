"""A device that takes another one's place is compared with what there is to be made anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from cli.operate.replacing import bytes_to_make, check_room, smaller_by
from lakefs.errors import PreconditionFailed
from lakefs.limits import GIB


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def member(name: str, used: int | None, free: int | None, places: int = 100, **more: Any) -> dict[str, Any]:
    found = {"id": name, "up": used is not None, "state": "up", "used_bytes": used, "free_bytes": free}
    return {**found, "places": places, "room_bytes": 10 * GIB, **more}


LOST: Final = member("lost", None, None)
OTHERS: Final = [member("a", 6 * GIB, GIB), member("b", 4 * GIB, GIB), member("c", 5 * GIB, 0)]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be made, on a device of 8 GiB with 2 GiB free."""

    def usage(path: Path) -> _Usage:
        assert path.exists()
        return _Usage(8 * GIB, 6 * GIB, 2 * GIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return tmp_path / "new" / "folder"


def test_what_does_not_answer_has_as_much_as_others_for_its_places() -> None:
    assert bytes_to_make([LOST, *OTHERS], "lost") == 5 * GIB
    assert bytes_to_make([{**LOST, "places": 50}, *OTHERS], "lost") == 5 * GIB // 2
    assert bytes_to_make([{**LOST, "used_bytes": 7}, *OTHERS], "lost") == 7
    assert bytes_to_make([{**LOST, "places": 0}, *OTHERS], "lost") == 0
    assert bytes_to_make(OTHERS, "lost") == 0, "it was removed already"
    assert bytes_to_make([LOST], "lost") == 0


def test_a_replacement_for_which_there_is_no_room_is_refused_by_how_much(device: Path) -> None:
    with pytest.raises(
        PreconditionFailed, match=r"2\.0 GiB free and the other members 2\.0 GiB, .* 1\.0 GiB too little"
    ):
        check_room(device, [LOST, *OTHERS], "lost")
    check_room(device, [LOST, *OTHERS, member("d", 5 * GIB, GIB)], "lost")
    check_room(device, OTHERS, "lost")


@pytest.mark.parametrize("change", [{"up": False}, {"state": "draining"}, {"shared_device": "one"}])
def test_only_room_that_takes_shards_counts_and_once(device: Path, change: dict[str, Any]) -> None:
    first = {**OTHERS[0], "shared_device": "one"}
    with pytest.raises(PreconditionFailed, match="too little"):
        check_room(device, [LOST, first, *OTHERS[1:], member("d", 5 * GIB, GIB, **change)], "lost")


def test_a_smaller_device_is_named_with_the_difference(device: Path, tmp_path: Path) -> None:
    assert "has 8.0 GiB, 2.0 GiB less than the one that it replaces" in smaller_by(tmp_path, [LOST], "lost")
    assert smaller_by(tmp_path, [{**LOST, "room_bytes": 8 * GIB}], "lost") == ""
    assert smaller_by(tmp_path, [], "lost") == "", "a replacement that is repeated"
