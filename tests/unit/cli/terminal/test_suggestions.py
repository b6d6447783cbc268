"""Suggestions for what does not exist: right ones, or none."""

from __future__ import annotations

import click
import pytest

from cli.main import COMMANDS, lake, run
from cli.terminal import suggestions


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["lss"], "ls"),
        (["stauts"], "status"),
        (["umount"], "unmount"),
        (["verson"], "versions"),
        (["list"], "ls"),
        (["delete", "b/k"], "rm"),
        (["upload"], "put"),
        (["mb", "b"], "bucket create"),
        (["bucket", "list"], "ls"),
        (["bucket", "delete", "b"], "rm"),
        (["key", "creat"], "create"),
        (["rm", "--recursve", "b"], "--recursive"),
        (["put", "--folow", "a", "b/k"], "--follow"),
        (["get", "--no-clober", "b/k", "x"], "--no-clobber"),
        (["get", "--recur", "b/k", "x"], "--recursive"),
        (["cat", "--ofset", "1", "b/k"], "--offset"),
        (["gut"], "get"),
        (["sl"], "ls"),
        (["moutn"], "mount"),
    ],
)
def test_a_slip_or_a_word_of_another_tool_is_understood(
    typed: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(typed) == 2
    assert f"(Did you mean {hint}?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        ["bucket", "set", "--quota", "1G", "b"],
        ["put", "-r", "--exclude", "x", "a", "b/k"],
        ["frobnicate"],
        ["zz"],
        ["ls", "--color"],
        ["ls", "--all"],
        ["-x", "ls"],
        ["rm", "-x", "b/k"],
        ["bucket", "frob"],
    ],
)
def test_nothing_is_suggested_rather_than_something_wrong(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed) == 2
    said = capsys.readouterr().err
    assert "No such" in said
    assert "mean" not in said


def test_no_command_and_no_option_is_taken_for_another_one_of_the_same_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert suggestions.close("ab", {"cd": "cd"}) == []
    assert suggestions.close("st", {"stat": "stat"}) == [], "two letters begin too much"
    assert suggestions.close("sta", {"stat": "stat", "status": "status"}) == ["stat"]
    assert suggestions.close("xyzzy", {}) == []


def test_the_words_of_other_tools_lead_to_commands_that_exist() -> None:
    context = click.Context(lake)
    for word, meant in suggestions._WORDS.items():
        assert word not in COMMANDS
        first, *rest = meant.split()
        if first.startswith("--"):
            assert first in {"--help", "--version"}
            continue
        command = lake.get_command(context, first)
        assert command is not None
        if rest:
            assert isinstance(command, click.Group)
            assert rest[0] in command.commands
