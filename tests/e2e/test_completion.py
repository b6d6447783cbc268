"""Completion of buckets, keys, access keys and spaces; whatever goes wrong, nothing reaches the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem

import lakefs
from cli.main import lake as root
from cli.terminal import completing
from cli.terminal.target import Target
from tests.e2e.served import ROOT, Served, environment, lake

KEYS = ("run1/a.bin", "run1/b c.bin", "run2/x", "top", "run1/new\nline")


@pytest.fixture(scope="module", autouse=True)
def _filled(served: Served) -> None:
    with lakefs.connect(served.server) as client:
        client.put_many([(f"models/{key}", b"x") for key in KEYS], create_bucket=True)
        client.create_bucket("moods")
        client.space("space")


def completed(server: str, *words: str) -> list[str]:
    """Return what the last word can become, `FILES` for local files."""
    *args, incomplete = words
    shell = completing.BashNames(root, {"obj": Target(server=server)}, "lake", "_LAKE_COMPLETE")
    found: list[CompletionItem] = shell.get_completions(list(args), incomplete)
    return [item.value if item.type == "plain" else "FILES" for item in found]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ls", "mo"], ["models/", "moods/"]),
        (["ls", "models/"], ["models/run1/", "models/run2/", "models/top"]),
        (["rm", "models/top", "models/run1/"], ["models/run1/a.bin", "models/run1/b c.bin"]),
        (["get", "-r", "models/run1/b"], ["models/run1/b c.bin"]),
        (["get", "models/top", "x"], ["FILES"]),
        (["cat", "lake://mod"], ["lake://models/"]),
        (["cat", "lake://models/t"], ["lake://models/top"]),
        (["put", "mood"], ["moods/", "FILES"]),
        (["bucket", "rm", "m"], ["models", "moods"]),
        (["key", "create", "--bucket", "mod"], ["models"]),
        (["kv", "stat", "s"], ["space"]),
        (["versions", "restore", "models/t"], ["models/top"]),
        (["ls", "none/"], []),
        (["ls", "models/zzz"], []),
    ],
)
def test_a_word_is_completed(served: Served, words: list[str], found: list[str]) -> None:
    assert completed(served.server, *words) == found


def test_an_access_key_is_completed(served: Served) -> None:
    with lakefs.connect(served.server) as client:
        made = client.create_access_key()
    assert completed(served.server, "key", "rm", made.access_key[:6]) == [made.access_key]


def test_an_engine_that_does_not_answer_costs_a_moment_and_says_nothing(
    served: Served, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert completed(f"unix:{tmp_path}/none", "ls", "mo") == []
    assert completed("nonsense", "ls", "mo") == []
    context = click.Context(root, obj=Target(data=tmp_path))
    assert completing.complete_names(context, click.Argument(["name"]), "mo") == []
    assert served.process is not None
    served.process.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert completed(served.server, "ls", "mo") == []
        assert time.monotonic() - began < 10 * completing.TIMEOUT_S
    finally:
        served.process.send_signal(signal.SIGCONT)
    assert capfd.readouterr() == ("", "")


def test_bash_completes_names_as_words(served: Served, tmp_path: Path) -> None:
    command = tmp_path / "lake"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.main "$@"\n')
    command.chmod(0o755)
    script = lake("completion", "bash").text + (
        'COMP_WORDS=(lake ls models/run1/); COMP_CWORD=2; _lake_completion lake\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    variables = environment(served.server) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    assert done.stdout.splitlines() == ["models/run1/a.bin", "models/run1/b\\ c.bin"], done
