"""The commands of docs/tour.md, run as printed, print what the tour says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.served import environment
from tests.style.source_tree import ROOT

_COMMAND = re.compile(r"^ {4}((?:cd|echo|export|for|grep|head|kill|lake|ls|mkdir|printf|tail|while) .*)$", re.MULTILINE)


def test_a_newcomer_s_tour_prints_what_it_says(tmp_path: Path) -> None:
    lake = tmp_path / "bin" / "lake"
    lake.parent.mkdir()
    lake.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.main "$@"\n')
    lake.chmod(0o755)
    commands = "\n".join(_COMMAND.findall((ROOT / "docs" / "tour.md").read_text()))
    commands = commands.replace("$PWD/.venv/bin", str(lake.parent)).replace("/tmp/tour", str(tmp_path / "tour"))
    done = subprocess.run(
        ["bash", "-c", f"set -m\n{commands}\n"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "tour").exists(), done
    printed = done.stdout
    for words in ("LAKESUPR\nLAKEJRNL\nLAKESEGM\nLAKESEGM\n", ":LGRP\n", ":weights.bin\n", ".journal\n"):
        assert words in printed, done
    assert printed.count("the same bytes\n") == 3, done
    assert "exit 1\n" in printed, done
    assert "lake: bucket models did not exist, and was made\n" in done.stderr, done
    assert "lake: models/run1/weights.bin is damaged on disk and was not read" in done.stderr, done
    assert re.search(r"^live_bytes +18 B$", printed, re.MULTILINE), done
    assert re.search(r"^freed_bytes +3\.0 MiB$", printed, re.MULTILINE), done
