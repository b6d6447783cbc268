"""Messages of commands on buckets, keys and spaces."""

from __future__ import annotations

import pytest

from tests.unit.cli.objects.conftest import Shell


@pytest.mark.parametrize("command", [("bucket", "rm", "nope"), ("rm", "nope/x"), ("rm", "-r", "nope")])
def test_nobody_who_removes_is_told_to_make_a_bucket(shell: Shell, command: tuple[str, ...]) -> None:
    done = shell(*command)
    assert done.code == 66
    assert "bucket 'nope' does not exist; see which do with: lake bucket ls" in done.err
    assert "create" not in done.err


def test_a_key_for_a_bucket_that_is_not_there_is_made_with_a_warning(shell: Shell) -> None:
    shell.lake.create_bucket("there")
    done = shell.good("key", "create", "--bucket", "nope", "--bucket", "there")
    assert done.out.startswith("access key  ")
    assert done.err.startswith("lake: bucket nope does not exist yet; ")
    assert "there" not in done.err.splitlines()[0].split(";")[0]
    assert shell.good("key", "create", "--bucket", "there").err == ""


def test_spaces_are_listed_under_a_header(shell: Shell) -> None:
    assert shell.good("kv", "ls").out == ""
    shell.good("kv", "set", "space", "--quota", "1G")
    header, line = shell.good("kv", "ls").lines
    assert header.split() == ["VALUES", "SIZE", "QUOTA", "SPACE"]
    assert [header.rindex("QUOTA") + 5, header.index("SPACE")] == [line.rindex("1.0 GiB") + 7, line.index("space")]
