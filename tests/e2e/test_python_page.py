"""Every block of docs/python.md runs, as it stands there, one after the other in one process, against an engine.

The examples of `lake://` need libraries that only `make test-plugins` has: tests/plugins/fsspec/test_python_page.py.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.served import ROOT, serving

OF_PLUGINS: Final = "## `lake://` for pandas, torch and others\n"


def blocks(page: str) -> list[str]:
    """Return the indented blocks of a page outside its section on `lake://`, in order."""
    text = (ROOT / page).read_text()
    before, _, rest = text.partition(OF_PLUGINS)
    text = before + rest[rest.find("\n## ") :]
    found = re.findall(r"\n\n((?: {4}.*\n|\n(?= {4}))+)", text)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found]


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = blocks("docs/python.md")
    assert len(programs) >= 9
    names: dict[str, Any] = {"__name__": "page"}
    with serving(tmp_path / "lake") as served:
        monkeypatch.setenv("LAKE_SERVER", served.server)
        try:
            for program in programs:
                exec(compile(program, "docs/python.md", "exec"), names)
            samples = names["Samples"](["models/a", "models/x"])
            assert samples.__getitems__([1, 0]) == [b"content", samples[0]]
            samples.lake.close()
            assert names["total"] > 0
            assert (names["shapes"], float(names["mean"])) == ({"w": (1000, 1000)}, float(names["weights"].mean()))
            assert (names["first"], names["counts"].size_bytes) == (b"first", len("step 1"))
            assert capsys.readouterr().out.startswith("'models/nothing' does not exist")
            assert (tmp_path / "run1.back/log").read_text() == "step 1"
            assert not names["lake"].exists("models/run1/log")
            assert names["lake"].get("models/in-step/log") == b"step 1"
        finally:
            names["lake"].close()
