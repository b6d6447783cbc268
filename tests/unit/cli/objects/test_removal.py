"""`lake rm`: it asks before much is removed, sums up, and says how to get it back."""

from __future__ import annotations

import json

import pytest

from tests.odd_names import put_odd
from tests.unit.cli.objects.conftest import Shell

MANY = [f"d/{index:03}" for index in range(101)]


def test_a_whole_bucket_is_removed_only_if_somebody_on_the_terminal_agrees(shell: Shell) -> None:
    shell.fill("asked/a", "asked/d/b")
    done = shell.on_terminal("\n", "rm", "-r", "asked")
    assert done.code == 1
    assert "Remove all that is in the bucket asked: 2 objects (16 B)?" in done.err
    assert "nothing was removed" in done.err
    assert shell.names("asked") == ["a", "d/b"]
    done = shell.on_terminal("y\n", "rm", "-r", "asked")
    assert done.code == 0
    assert "2 objects (16 B) removed" in done.err
    assert shell.names("asked") == []


def test_a_folder_with_many_objects_is_asked_about_and_one_with_few_is_not(shell: Shell) -> None:
    shell.fill(*[f"folders/{name}" for name in MANY], "folders/few/x")
    assert shell.on_terminal("", "rm", "-r", "folders/few").code == 0
    assert shell.on_terminal("n\n", "rm", "-r", "folders/d").code == 1
    assert len(shell.names("folders")) == len(MANY)


@pytest.mark.parametrize("option", ["-y", "--yes", "-f", "--force"])
def test_nothing_is_asked_of_somebody_who_said_so(shell: Shell, option: str) -> None:
    shell.fill("sure/a")
    assert shell.on_terminal("", "rm", "-r", option, "sure").code == 0
    assert shell.names("sure") == []


def test_a_program_is_not_asked_and_gets_the_summary_on_stderr(shell: Shell) -> None:
    shell.fill("program/a", "program/d/b")
    shell.lake.make_folder("program/empty/er")
    done = shell.good("rm", "-r", "program")
    assert (done.out, done.err) == ("", "2 objects (20 B) and 1 folder removed\n")
    shell.fill("program/a")
    done = shell.good("rm", "-r", "--json", "program")
    assert (json.loads(done.out), done.err) == ({"removed": 1}, "")


def test_what_a_bucket_with_versions_keeps_comes_back_by_the_command_that_rm_says(shell: Shell) -> None:
    shell.fill("kept/a b", "kept/d/x", "kept/d/y", "plain/a")
    shell.good("bucket", "set", "kept", "--versioning", "enabled")
    said = shell.good("rm", "kept/a b", "plain/a").err
    assert said == "lake: older versions are kept; to get it back: lake versions restore 'kept/a b'\n"
    said, hint = shell.good("rm", "-r", "kept/d").err.splitlines()
    assert said == "2 objects (16 B) removed", "a name that is not there is none of them"
    assert shell("rm", "kept/none").code == 66
    assert hint == "lake: older versions are kept; to get it back: lake versions restore -r kept/d"
    assert shell.good("rm", "-f", "plain/a").err == ""
    shell.good("versions", "restore", "kept/a b")
    shell.good("versions", "restore", "-r", "kept/d")
    assert shell.names("kept") == ["a b", "d/x", "d/y"]


def test_what_several_patterns_or_folders_take_is_removed_once_and_without_an_error(shell: Shell) -> None:
    shell.fill("twice/a", "twice/d", "twice/d/x", "twice/d/e/y", "twice/left")
    put_odd(shell.lake, "twice", "z//q", b"odd")
    done = shell.good("rm", "-r", "twice/[adz]*", "twice/d/**", "twice/a*")
    assert done.err == "5 objects (37 B) removed\n"
    assert shell.names("twice") == ["left"]
    shell.fill("twice/a", "twice/d/x")
    assert shell.good("rm", "twice/a*", "twice/*a").err == ""
    assert shell("rm", "-r", "twice/d", "twice/d/x").code == 66, "a name that is typed has to be there"
