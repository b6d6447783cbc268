"""The model-based test: some sequences on every run, thousands with `python -m tests.mount --sequences 20000`.

The harness is tested first: on two plain folders, and on a file system that passes through, it finds nothing, and it
finds each bug that is planted there.  MOUNT_SEQUENCES sets how many sequences the mount gets here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.served import ROOT, environment
from tests.lengths import repeated
from tests.mount.hunt import Finding, hunt
from tests.mount.model import Ground
from tests.mount.mounts import LakeMounts, passthrough
from tests.mount.planted import BUGS
from tests.mount.steps import Step, sequence

pytestmark = [pytest.mark.slow, pytest.mark.fuse, pytest.mark.thorough]

SEQUENCES: Final = int(os.environ.get("MOUNT_SEQUENCES", "0")) or repeated(70, 120)
PLANTED_SEQUENCES: Final = 400


def _findings(seeds: range, ground: Ground) -> str:
    """Return the scripts of all findings; empty when there are none."""
    found = [finding for finding in hunt(seeds, ground, "t") if finding is not None]
    return "\n\n".join(f"seed {finding.seed}:\n{finding.script()}" for finding in found)


def _plain(folder: Path) -> Path:
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    return plain


def test_two_plain_folders_never_differ(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert _findings(range(150), Ground(_plain(tmp_path), (other,))) == ""


def test_a_file_system_that_passes_through_never_differs(tmp_path: Path) -> None:
    with passthrough(tmp_path) as mounts:
        assert _findings(range(60), Ground(_plain(tmp_path), (mounts[0].folder,))) == ""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    with passthrough(tmp_path, bug=bug) as mounts:
        ground = Ground(_plain(tmp_path), (mounts[0].folder,))
        assert any(hunt(range(PLANTED_SEQUENCES), ground, "b")), f"{PLANTED_SEQUENCES} sequences saw nothing"


def test_a_found_sequence_is_short_and_its_script_runs(tmp_path: Path) -> None:
    with passthrough(tmp_path, bug="lost-last-byte") as mounts:
        ground = Ground(_plain(tmp_path), (mounts[0].folder,))
        finding = next(filter(None, hunt(range(PLANTED_SEQUENCES), ground, "b")))
        assert len(finding.steps) <= 3
        script = tmp_path / "script.py"
        script.write_text(finding.script())
        done = subprocess.run(
            [sys.executable, script, _plain(tmp_path)],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(finding.steps)


def test_a_process_that_is_killed_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("tests.mount.hunt.run", killed)
    [found] = hunt([7], Ground(_plain(tmp_path), (tmp_path,)), "k")
    assert found is not None
    assert "SIGKILL" in found.what


def test_a_finding_prints_where_it_differs() -> None:
    steps = (Step("mkdir", ("d", 0o755)), Step("open", (0, "d/a", os.O_RDWR | os.O_CREAT, 0o600)))
    text = Finding(1, steps, "expected 'opened', got EIO", 1).script()
    assert "# here: expected 'opened', got EIO\nstep(\"place.open(0, 'd/a', os.O_RDWR | os.O_CREAT, 0o600)\")" in text


def test_a_seed_always_gives_the_same_sequence() -> None:
    assert sequence(11, mounts=2) == sequence(11, mounts=2)
    assert sequence(11) != sequence(12)


def test_the_mount_is_as_a_local_disk(mounts: LakeMounts, tmp_path: Path) -> None:
    assert _findings(range(SEQUENCES), Ground(_plain(tmp_path), (mounts.folders[0],))) == ""


def test_two_mounts_show_what_was_closed_on_one(mounts: LakeMounts, tmp_path: Path) -> None:
    assert _findings(range(SEQUENCES, 2 * SEQUENCES), Ground(_plain(tmp_path), tuple(mounts.folders))) == ""
