"""vLLM and LMCache themselves, in their locked versions, over a real engine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.served import ROOT, Served, environment

pytestmark = pytest.mark.plugins
BIN: Final = ROOT / ".venv-plugins/bin"
LIMIT_S: Final = 300.0
"""Time limit of a program: one that takes longer hangs.  Nothing here is timed."""


def run(served: Served, folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    assert BIN.exists(), "the libraries are not installed; run: make test-plugins"
    return subprocess.run(
        list(map(str, command)),
        env=environment(served.server) | {"HOME": str(folder), "LMCACHE_DISABLE_BANNER": "1"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def space_of(served: Served, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(served.good("kv", "stat", name, "--json").out)
    return found


def entries() -> list[Any]:
    """Return the entries of the page that a user copies, in order: vLLM's and LMCache's."""
    page = (ROOT / "docs/kv-cache.md").read_text()
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]


def test_the_entries_of_the_page_make_the_tiers_that_they_name(served: Served, tmp_path: Path) -> None:
    vllm, lmcache = entries()
    done = run(served, tmp_path, BIN / "python", ROOT / "tests/plugins/kv/vllm_page.py", json.dumps(vllm))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    name, space, is_lent = done.stdout.splitlines()[-1].split()
    assert (name, is_lent) == ("LakeTier", "True")
    assert space_of(served, space)["quota_bytes"] == 200 << 30
    bench = ("bench", "l2", "--no-skip-verify", "--num-keys", "4", "--rounds", "1", "--data-size-kb", "64")
    done = run(served, tmp_path, BIN / "lmcache", *bench, "--l2-adapter", json.dumps(lmcache))
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    space = lmcache["adapter_params"]["space"]
    assert space_of(served, space)["quota_bytes"] == 200 << 30


def test_two_vllm_tiers_share_the_blocks_of_one_prompt(served: Served, tmp_path: Path) -> None:
    done = run(served, tmp_path, BIN / "python", ROOT / "tests/plugins/kv/vllm_host.py")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    name = done.stdout.splitlines()[-1]
    assert name.startswith("vllm/llama_8b-")
    space = space_of(served, name)
    assert (space["entries"], space["value_bytes"]) == (16, 16 * 65536), "1.0 times the bytes of the prompt"


@pytest.mark.parametrize("size_kb", [64, 5000])
def test_lmcache_s_own_bench_verifies_every_byte(served: Served, tmp_path: Path, size_kb: int) -> None:
    adapter = {
        "type": "native_plugin",
        "module_path": "lakefs.plugins.kv.lmcache_connector",
        "class_name": "LakeConnector",
        "adapter_params": {"server": served.server, "space": f"bench-{size_kb}"},
    }
    options = ("--no-skip-verify", "--num-keys", "16", "--rounds", "3", "--data-size-kb", str(size_kb))
    done = run(served, tmp_path, BIN / "lmcache", "bench", "l2", "--l2-adapter", json.dumps(adapter), *options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    lines = [line.split(":", 1) for line in done.stdout.splitlines() if ":" in line]
    totals = [value.strip() for name, value in lines if name.strip() == "Total success"]
    assert "48" in totals, done.stdout[-4000:]
    assert space_of(served, f"bench-{size_kb}")["value_bytes"] % (size_kb * 1024) == 0


_OTHER_VERSION: Final = """
import importlib.metadata
importlib.metadata.version = lambda name: "0.99.0"
from lakefs.errors import UnsupportedVersion
try:
    import lakefs.plugins.kv.vllm_tier
except UnsupportedVersion as error:
    print(error)
"""


def test_a_vllm_of_another_version_is_refused_by_name(served: Served, tmp_path: Path) -> None:
    done = run(served, tmp_path, BIN / "python", "-c", _OTHER_VERSION)
    assert "vllm 0.99.0 is installed; this plug-in knows vllm 0.33.0 and later, before 0.34.0" in done.stdout
