"""README's commands, run as printed on a machine on which lake was never started, do what README says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.e2e.fresh_machine import fresh_machine
from tests.style.source_tree import ROOT

_BLOCK = re.compile(r"(?:^ {4}.*\n|^\n(?= {4}))+", re.MULTILINE)


def blocks() -> list[str]:
    """Return the indented blocks between `Use` and the next heading."""
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## Use\n")[1].split("\n## ")[0]
    return [re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE) for found in _BLOCK.finditer(section)]


def test_what_readme_has_make_do_can_be_made() -> None:
    targets = re.findall(r"^ {4}make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.fuse
def test_the_commands_of_readme_work_as_they_are_printed() -> None:
    path, shell, code, end = blocks()
    with fresh_machine() as machine:
        (machine.folder / ".venv" / "bin").mkdir(parents=True)
        command = machine.folder / ".venv" / "bin" / "lake"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli.main "$@"\n')
        command.chmod(0o755)
        in_python = f"{sys.executable} - <<'EOF'\n{code}EOF\n"
        script = f"set -e\n{path}{shell}\n{in_python}{end}wait\ncmp ~/checkpoints/* ~/back/*\n"
        done = machine.run("bash", "-c", script)
        assert done.code == 0, done
        said = [line for line in done.err.splitlines() if "lake: " in line]
        assert said == ["lake: bucket models did not exist, and was made"], done
        assert "stopped" in done.text, done
        assert "model.safetensors" in done.text


def test_readme_says_what_a_machine_needs_and_mounts_beside_any_checkout() -> None:
    text = (ROOT / "README.md").read_text()
    begin = text.split("\n## Use\n")[0]
    clone = re.search(r"^ {4}git clone URL (\S+) && cd (\S+)", begin, flags=re.MULTILINE)
    assert clone is not None
    assert clone[1] == clone[2]
    assert begin.index("apt-get install git make python3-venv") < clone.start(), "before it"
    folders = re.findall(r"lake (?:un)?mount (\S+)", text)
    assert set(folders) == {"~/lake-mount"}
    assert clone[1] not in folders[0], "a checkout has another name, whatever folder it is in"
    readers = re.findall(r"^\| (?:run jobs|have S3|operate|read or change)", begin, flags=re.MULTILINE)
    assert len(readers) == 4
