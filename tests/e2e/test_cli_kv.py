"""`lake kv`: spaces are set, listed, shown and purged; a space that does not exist says so."""

from __future__ import annotations

import json
from pathlib import Path

import lakefs
from tests.e2e.served import Served, lake


def test_spaces_are_set_listed_shown_and_purged(served: Served) -> None:
    made = json.loads(served.good("kv", "set", "llama/tp2", "--quota", "1G", "--ttl", "7d", "--json").out)
    assert (made["space"], made["quota_bytes"], made["ttl_s"], made["entries"]) == ("llama/tp2", 1 << 30, 604_800, 0)
    with lakefs.connect(served.server) as lake:
        lake.space("llama/tp2").put_many([b"a", b"b"], [b"x" * 1000, b"y" * 500])
    shown = json.loads(served.good("kv", "stat", "llama/tp2", "--json").out)
    assert (shown["quota_bytes"], shown["entries"], shown["value_bytes"]) == (1 << 30, 2, 1500)
    assert [line.split() for line in served.good("kv", "stat", "llama/tp2").lines][-2:] == [
        ["entries", "2"],
        ["value_bytes", "1500"],
    ]
    (line,) = [line for line in served.good("kv", "ls").lines if line.endswith("  llama/tp2")]
    assert line.split()[0] == "2"
    assert "llama/tp2" in {space["space"] for space in json.loads(served.good("kv", "ls", "--json").out)["spaces"]}
    (line,) = [line for line in served.good("status").lines if line.startswith("space llama/tp2 ")]
    assert line.split(maxsplit=2)[2] == "2 values, 1.5 KiB of 1.0 GiB"
    changed = json.loads(served.good("kv", "set", "llama/tp2", "--quota", "0", "--json").out)
    assert (changed["quota_bytes"], changed["ttl_s"]) == (0, 604_800)
    served.good("kv", "purge", "llama/tp2")
    for command in ("stat", "purge"):
        assert served("kv", command, "llama/tp2").code == 66


def test_a_bad_quota_or_time_is_refused(served: Served) -> None:
    for options in (("--quota", "1K"), ("--quota", "much"), ("--ttl", "soon")):
        assert served("kv", "set", "bad", *options).code == 2
    assert "bad" not in served.good("kv", "ls").text.split()


def test_the_first_space_of_a_store_is_told_with_what_it_means(tmp_path: Path) -> None:
    for count, space in enumerate(("first", "second", "first")):
        done = lake("--data", tmp_path / "data", "kv", "set", space, "--json")
        assert done.code == 0
        assert json.loads(done.out)["space"] == space
        assert ("releases that know no spaces" in done.err) == (count == 0)
