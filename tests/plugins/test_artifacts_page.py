"""The examples of docs/artifacts.md run, as they stand there: MLflow, FAISS, and LanceDB through the gateway."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.s3_client import KEYS_ARE_FRESH_S, url_of
from tests.e2e.served import ROOT, Served, environment, serving
from tests.plugins.fsspec.test_libraries import PYTHON

PAGE = ROOT / "docs/artifacts.md"
MLFLOW_CHECKS = """
assert names == ["again", "base", "weights.bin"], names
assert pathlib.Path(back).read_bytes() == b"of another run"
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from lakefs.plugins.mlflow.artifacts import LakeArtifactRepository
repository = get_artifact_repository(run.info.artifact_uri)
assert isinstance(repository, LakeArtifactRepository)
[listed] = repository.list_artifacts("base")
assert (listed.path, listed.is_dir, listed.file_size) == ("base/weights", False, 14)
assert repository.list_artifacts("base/weights") == repository.list_artifacts("none") == []
folder = pathlib.Path("tree/in"); folder.mkdir(parents=True)
for n in range(3): (folder / str(n)).write_bytes(b"%d" % n)
repository.log_artifacts("tree", "tree")
whole = pathlib.Path(repository.download_artifacts("tree"))
assert sorted(path.name for path in (whole / "in").iterdir()) == ["0", "1", "2"]
with lakefs.connect() as lake:
    root = f"models/mlflow/{run.info.run_id}/artifacts"
    assert lake.stat(f"{root}/weights.bin").blob == lake.stat(f"{root}/again/weights.bin").blob
    result = lake.put("models/weights", pathlib.Path("weights.bin"))
    assert (result.size_bytes, result.new_bytes) == (1_000_000, 0)
    repository.delete_artifacts("weights.bin")
    repository.delete_artifacts("tree")
    assert [one.path for one in repository.list_artifacts()] == ["again", "base"]
    try:
        repository.delete_artifacts("nothing")
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("it was deleted")
    try:
        repository.log_artifact("weights.bin", "../..")
    except lakefs.LakeError:
        pass
    else:
        raise AssertionError("it was stored above the root")
    repository.delete_artifacts()
    assert repository.list_artifacts() == []
    assert lake.get("models/base/weights") == b"of another run"
"""
FAISS_CHECKS = """
assert back.ntotal == index.ntotal == 1000
query = numpy.full((1, 64), 0.5, dtype="float32")
assert (back.search(query, 5)[1] == index.search(query, 5)[1]).all()
"""
LANCE_CHECKS = """
assert [one["word"] for one in found] == ["between"], found
assert later == 301
"""
CHECKS = {"mlflow": MLFLOW_CHECKS, "faiss": FAISS_CHECKS, "lancedb": LANCE_CHECKS}


def examples() -> dict[str, str]:
    """Return the program of each library."""
    text = PAGE.read_text()
    found = {}
    for section in text.split("\n## ")[1:]:
        blocks = re.findall(r"\n\n((?: {4}.*\n|\n(?= {4}))+)", section)
        program = "\n".join(textwrap.dedent(block) for block in blocks if not block.lstrip().startswith("pip "))
        found[section.partition("\n")[0].lower()] = program
    return found


def test_the_page_has_a_program_for_each_library() -> None:
    programs = examples()
    assert set(programs) == set(CHECKS)
    for name, program in programs.items():
        compile(program, str(PAGE), "exec")
        assert re.search(rf"\b{name}\b", program.partition("\n")[0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine with S3, and the buckets of the page."""
    with serving(tmp_path_factory.mktemp("lake"), "--s3", "127.0.0.1:0") as engine:
        for bucket in ("models", "vectors"):
            engine.good("bucket", "create", bucket)
        yield engine


@pytest.mark.plugins
@pytest.mark.parametrize("library", sorted(CHECKS))
def test_each_example_runs_as_it_is_written(served: Served, tmp_path: Path, library: str) -> None:
    key = json.loads(served.good("key", "create", "--json").text)
    time.sleep(KEYS_ARE_FRESH_S)
    secrets = {"AWS_ACCESS_KEY_ID": key["access_key"], "AWS_SECRET_ACCESS_KEY": key["secret_key"]}
    done = subprocess.run(
        [str(PYTHON), "-c", examples()[library] + CHECKS[library]],
        cwd=tmp_path,
        env=environment(served.server) | secrets | {"LAKE_S3_URL": url_of(served), "GIT_PYTHON_REFRESH": "quiet"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
