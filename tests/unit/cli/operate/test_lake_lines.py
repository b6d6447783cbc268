"""Commands for operators, of a lake on many members: the lines they print, and their exit codes."""

from __future__ import annotations

from typing import Any

import pytest

from cli.operate import fsck, scrub
from cli.operate.lake_lines import gc_lines, lake_lines, outlives

WHOLE: dict[str, Any] = {
    "name": "prod",
    "id": "6c" * 16,
    "protection": "4+2",
    "ring_epoch": 3,
    "ring_epochs": 1,
    "gc_generation": 9,
    "members": [
        {
            "id": "01" * 16,
            "state": "up",
            "up": True,
            "reason": "",
            "addresses": ["unix:/run/lake.sock.1", "tcp://10.0.0.4:9101"],
            "places": 8192,
            "used_bytes": 1 << 30,
            "free_bytes": 3 << 30,
            "damaged_chunks": 0,
        },
        {
            "id": "02" * 16,
            "state": "up",
            "up": False,
            "reason": "it does not answer\n",
            "addresses": ["unix:/run/lake.sock.1"],
            "places": 0,
            "used_bytes": None,
            "free_bytes": None,
            "damaged_chunks": None,
        },
    ],
    "outlives": {"devices": 1, "machines": 0},
    "walker": {
        "healed": True,
        "dirty_partitions": 0,
        "position": 0.0,
        "eta_s": None,
        "last_pass": {"ended_ns": 1_700_000_000 * 10**9, "chunks": 12, "stripes_left": 0},
    },
    "gc": {"running": False, "last_ended_ns": 0, "last": None},
    "names": {
        "devices": 2,
        "copies": [
            {"folder": "/a", "state": "good", "reason": ""},
            {"folder": "/b", "state": "good", "reason": ""},
            {"folder": "/c", "state": "out", "reason": "I/O error"},
        ],
    },
}


def of(**changes: Any) -> dict[str, Any]:
    return {**WHOLE, **changes}


def test_each_member_has_a_line_and_the_lake_a_sentence_of_losses() -> None:
    assert lake_lines(WHOLE) == [
        "lake                                    prod, protection 4+2, ring epoch 3",
        f"member {'01' * 16} up, 1.0 GiB used, 3.0 GiB free, at 10.0.0.4:9101",
        f"member {'02' * 16} away, no places: it does not answer\\n",
        "outlives 1 more device, no machine; names: 2 devices",
        "walker                                  healed, last pass 2023-11-14T22:13:20Z: 12 chunks, 0 left",
        "gc                                      generation 9, no cycle since the start",
        "names in /c                             out: I/O error",
    ]


def test_a_folder_without_a_member_that_serves_has_its_reason() -> None:
    folders = [
        {"folder": "/a", "member": "01" * 16, "serves": True, "restarts": 0, "reason": ""},
        {"folder": "/b", "member": "02" * 16, "serves": False, "restarts": 3, "reason": "the disk failed"},
        {"folder": "/c", "member": "", "serves": False, "restarts": 1, "reason": ""},
    ]
    told = [line for line in lake_lines(WHOLE, folders) if line.startswith("folder")]
    assert told == [
        "folder /b                               no member serves in it: the disk failed",
        "folder /c                               no member in it",
    ]


def test_members_that_share_a_device_are_named() -> None:
    members = [{**member, "shared_device": "01" * 16} for member in WHOLE["members"]]
    told = [line for line in lake_lines(of(members=members)) if line.startswith("shared device")]
    assert [line.split(maxsplit=2)[2] for line in told] == [
        "members 010101010101, 020202020202 lie on one device, and are lost together"
    ]


def test_a_member_that_scrubs_says_how_far_it_is() -> None:
    first, second = WHOLE["members"]
    part = {"position": 0.425, "damage_found": 0, "ended_ns": 0}
    told = lake_lines(of(members=[{**first, "scrub": {**part, "state": "running"}}, {**second, "scrub": None}]))
    assert told[1].endswith("at 10.0.0.4:9101, scrub running at 42.5%")
    assert "scrub" not in told[2]
    idle = lake_lines(of(members=[{**first, "scrub": {**part, "state": "idle"}}, second]))
    assert "scrub" not in idle[1]


def test_a_member_that_came_back_old_is_said_to_be_compared() -> None:
    first, second = WHOLE["members"]
    told = lake_lines(of(members=[{**first, "is_old": True}, {**second, "is_old": False}]))
    assert told[1].endswith("came back as it was earlier, and is being compared with the others")
    assert "earlier" not in told[2]


@pytest.mark.parametrize(
    ("devices", "machines", "dirty", "told"),
    [
        (2, 1, 0, "outlives 2 more devices, 1 machine (not the one with the names)"),
        (0, 0, 0, "outlives no more device, no machine"),
        (
            2,
            2,
            1,
            "outlives 2 more devices, 2 machines (not the one with the names); less until 1 dirty partition is healed",
        ),
        (-1, -1, 5, "too few members are up: some content cannot be read until they are back"),
    ],
)
def test_the_sentence_of_losses(devices: int, machines: int, dirty: int, told: str) -> None:
    walker = {**WHOLE["walker"], "dirty_partitions": dirty}
    lake = of(outlives={"devices": devices, "machines": machines}, names={}, walker=walker)
    assert outlives(lake) == told


def test_names_of_several_shards_without_an_etcd_are_as_safe_as_the_worst_of_them() -> None:
    good, lost = ({"folder": f"/disk/1/{name}", "state": "good", "reason": ""} for name in ("names", "names.1"))
    lost |= {"state": "lost", "reason": "it cannot be written"}
    names = {"devices": 2, "copies": [good], "shards": [{"shard": 1, "devices": 1, "copies": [lost]}]}
    lake = of(names=names)
    assert "; names: 1 device" in outlives(lake)
    last = lake_lines(lake)[-1]
    assert last.startswith("names in /disk/1/names.1")
    assert last.endswith("lost: it cannot be written")


def test_a_walk_under_way_has_its_position_and_a_cycle_of_gc_those_who_took_no_part() -> None:
    walker = {
        "healed": False,
        "dirty_partitions": 40,
        "position": 0.25,
        "eta_s": 90.4,
        "last_pass": {"ended_ns": 0, "chunks": 0, "stripes_left": 0},
    }
    last = {"freed_bytes": 2 << 20, "members": {"01": {"kept_because": ""}, "02": {"kept_because": "away"}}}
    gc = {"running": False, "last_ended_ns": 1_700_000_000 * 10**9, "last": last}
    lines = lake_lines(of(walker=walker, gc=gc, ring_epochs=2))
    told = "40 dirty partitions, 25.0% of a pass, 90 s to go, no full pass yet, 2 tables in use"
    assert lines[4].endswith(told)
    assert lines[5].endswith("last cycle 2023-11-14T22:13:20Z: 2.0 MiB freed, 1 member took no part")


def test_a_lake_without_its_coordinator_says_so() -> None:
    (line,) = lake_lines({"name": "prod", "reason": "the coordinator cannot be asked"})
    assert line.endswith("the coordinator cannot be asked")


@pytest.mark.parametrize(
    ("damage", "unchecked", "repairs", "outcome", "code"),
    [
        (0, [], [], "clean", 0),
        (0, [{"object": "member 01", "reason": "away"}], [], "refused", 2),
        (1, [{"object": "member 01", "reason": "away"}], [], "damaged", 1),
        (0, [], [{}], "repaired", 3),
    ],
)
def test_a_member_that_is_away_could_not_be_checked(
    damage: int, unchecked: list[Any], repairs: list[Any], outcome: str, code: int
) -> None:
    assert fsck._outcome({"damage": damage, "unchecked": unchecked, "repairs": repairs}) == outcome
    assert fsck.EXIT_CODES[outcome] == code
    if not repairs:
        assert scrub._exit_code({"damaged": [{}] * damage, "unchecked": unchecked}) == code


def test_a_report_of_one_engine_has_no_word_about_members() -> None:
    assert fsck._outcome({"damage": 0, "repairs": []}) == "clean"
    assert scrub._exit_code({"damaged": []}) == 0


def test_gc_has_a_line_a_member_with_what_it_freed_or_the_reason_why_it_did_not() -> None:
    members: dict[str, dict[str, Any]] = {
        "01" * 16: {"freed_shards": 3, "freed_bytes": 12 << 10, "kept_because": "", "freed_chunks": 0},
        "02" * 16: {"freed_shards": 0, "freed_bytes": 0, "kept_because": "it is away"},
        "03" * 16: {"freed_shards": 1, "freed_bytes": 4 << 10, "not_collected_because": "it left\n"},
    }
    assert gc_lines(members) == [
        f"member {'01' * 16} 3 shards, 12.0 KiB freed",
        f"member {'02' * 16} freed nothing: it is away",
        f"member {'03' * 16} 1 shards, 4.0 KiB freed; it did not collect its own: it left\\n",
    ]
    assert gc_lines({}) == []


def test_lines_say_when_members_are_made_out_why_none_is_and_which_heads_serve() -> None:
    head = {"machine": "7f" * 16, "host": "here", "pid": 12, "since_ns": 1_700_000_000 * 10**9, "has_members": True}
    known = WHOLE | {"out_after_s": 600, "out_stops": "rack", "out_stopped_because": "", "heads": [head]}

    def said(name: str, **more: Any) -> list[str]:
        lines = lake_lines(known | more)
        return [line.removeprefix(name).strip() for line in lines if line.startswith(f"{name} ")]

    assert said("out") == ["after 600 s of silence, while no more than a rack is away"]
    assert said("out", out_stops="off") == ["after 600 s of silence"]
    assert said("out", out_stopped_because="9 are away")[0].endswith("; stopped: 9 are away")
    assert said("head") == [
        f"12                                 at here, machine {'7f' * 16}, since 2023-11-14T22:13:20Z"
    ]
    assert not any(line.startswith(("out ", "head ")) for line in lake_lines(WHOLE)), "of an earlier release"
