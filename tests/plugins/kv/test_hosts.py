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


def run(
    served: Served, folder: Path, *command: str | Path, before: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program; `before`: a folder of packages that are taken before those of the environment."""
    assert BIN.exists(), "the libraries are not installed; run: make test-plugins"
    own = environment(served.server) | {"HOME": str(folder), "LMCACHE_DISABLE_BANNER": "1"}
    if before is not None:
        own["PYTHONPATH"] = f"{before}:{own.get('PYTHONPATH', '')}"
    return subprocess.run(
        list(map(str, command)),
        env=own,
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


def tried() -> list[tuple[str, str, str]]:
    """Return the table of the page: the host, its version, and what came of it."""
    page = (ROOT / "docs/kv-cache.md").read_text()
    return re.findall(r"^\| (vLLM|LMCache) ([0-9.]+) \| (.*) \|$", page, flags=re.MULTILINE)


def test_the_page_has_the_release_that_is_locked_and_those_that_are_unpacked() -> None:
    locks = [(ROOT / "requirements" / name).read_text() for name in ("plugins-kv.txt", "kv-hosts.txt")]
    found = re.findall(r"^(vllm|lmcache)==(.*)$", "\n".join(locks), flags=re.MULTILINE)
    assert sorted((host.lower(), version) for host, version, _ in tried()) == sorted(found)
    minors = {version.rsplit(".", 1)[0] for host, version in found if host == "vllm"}
    assert len(minors) >= 4


@pytest.mark.parametrize(("version", "result"), [each[1:] for each in tried() if each[0] == "vLLM"])
def test_a_release_of_vllm_is_served_or_refused_as_the_page_says(
    served: Served, tmp_path: Path, version: str, result: str
) -> None:
    other = ROOT / ".venv-plugins/hosts" / f"vllm-{version}"
    is_locked = f"vllm=={version}" in (ROOT / "requirements/plugins-kv.txt").read_text()
    assert is_locked or other.exists(), "the release is not unpacked; run: make test-plugins"
    program = ROOT / "tests/plugins/kv/vllm_host.py"
    done = run(served, tmp_path, BIN / "python", program, before=None if is_locked else other)
    if result == "served":
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
        name = done.stdout.splitlines()[-1]
        assert name.startswith("vllm/llama_8b-")
        space = space_of(served, name)
        assert (space["entries"], space["value_bytes"]) == (16, 16 * 65536), "1.0 times the bytes of the prompt"
    else:
        reason = result.removeprefix("refused: ").strip("`")
        assert f"UnsupportedVersion: vllm {version} is not served: {reason}" in done.stderr


_OTHER_VERSION: Final = """
import importlib.metadata
importlib.metadata.version = lambda name: "0.99.0"
import lakefs.plugins.kv.vllm_tier
print("served")
"""
_OTHER_SIGNATURE: Final = """
from lakefs.errors import UnsupportedVersion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
def lookup(self, key, req_context, deadline): ...
SecondaryTierManager.lookup = lookup
try:
    import lakefs.plugins.kv.vllm_tier
except UnsupportedVersion as error:
    print(error)
"""


def test_a_vllm_is_judged_by_what_it_offers_and_not_by_its_number(served: Served, tmp_path: Path) -> None:
    done = run(served, tmp_path, BIN / "python", "-c", _OTHER_VERSION)
    assert done.stdout.splitlines()[-1] == "served", done.stderr[-4000:]
    done = run(served, tmp_path, BIN / "python", "-c", _OTHER_SIGNATURE)
    assert "SecondaryTierManager.lookup has (key, req_context, deadline), not (key, req_context)" in done.stdout


_ONE_MORE_FIELD: Final = """
from tests.plugins.kv import vllm_fields
del vllm_fields.SALT["attention backends"]
vllm_fields.main()
"""


def test_every_field_of_vllm_s_configuration_is_in_the_name_or_listed_with_a_reason(
    served: Served, tmp_path: Path
) -> None:
    done = run(served, tmp_path, BIN / "python", ROOT / "tests/plugins/kv/vllm_fields.py")
    assert (done.stdout, done.returncode) == ("", 0), done.stderr[-4000:]
    done = run(served, tmp_path, BIN / "python", "-c", _ONE_MORE_FIELD)
    assert "attention_config.indexer_kv_dtype is new: does a block depend on it?" in done.stdout
    assert done.returncode == 1
