"""Libraries that users open `lake://` with, in their locked versions, as their own documentation uses them.

They live in `.venv-plugins` (`make test-plugins` makes it), because they are none of the product's dependencies.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path
from typing import Final

import pytest

from lakefs.limits import CHUNK_BYTES
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import ROOT, environment

pytestmark = pytest.mark.plugins
PYTHON: Final = ROOT / ".venv-plugins/bin/python"
LIMIT_S: Final = 300.0
"""Time limit of a program: one that takes longer hangs.  Nothing here is timed."""


def run(fs: LakeFileSystem, body: str, folder: Path, *, code: int = 0) -> str:
    """Run a program with the libraries and LAKE_SERVER; return what it printed."""
    assert PYTHON.exists(), "the libraries are not installed; run: make test-plugins"
    done = subprocess.run(
        [str(PYTHON), "-c", textwrap.dedent(body)],
        env=environment(fs.server) | {"HOME": str(folder), "HF_HOME": str(folder / "hf")},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_pandas_writes_and_reads_tables(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    body = f"""
        import numpy, pandas
        table = pandas.DataFrame({{"n": range(300_000), "x": numpy.random.default_rng(1).random(300_000)}})
        for write, read, name in (
            (lambda p: table.to_parquet(p), pandas.read_parquet, "a.parquet"),
            (lambda p: table.to_csv(p, index=False), pandas.read_csv, "a.csv"),
            (lambda p: table.to_csv(p, index=False), pandas.read_csv, "a.csv.gz"),
            (lambda p: table.to_pickle(p), pandas.read_pickle, "a.pickle"),
        ):
            path = f"lake://{bucket}/tables/{{name}}"
            write(path)
            pandas.testing.assert_frame_equal(read(path), table)
        try:
            table.assign(o=[object()] * len(table)).to_parquet("lake://{bucket}/tables/a.parquet")
        except Exception:
            print("refused")
        pandas.testing.assert_frame_equal(pandas.read_parquet("lake://{bucket}/tables/a.parquet"), table)
        print(len(pandas.read_parquet("lake://{bucket}/tables/a.parquet", columns=["n"], filters=[("n", "<", 7)])))
        try:
            pandas.read_csv("lake://{bucket}/nothing.csv")
        except FileNotFoundError:
            print("not found")
    """
    assert run(fs, body, tmp_path) == "refused\n7\nnot found\n"
    assert len(fs.ls(f"{bucket}/tables")) == 4


def test_pyarrow_writes_and_scans_a_data_set(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    body = f"""
        import fsspec, pyarrow as pa, pyarrow.compute as pc, pyarrow.dataset as ds, pyarrow.parquet as pq
        fs = fsspec.filesystem("lake")
        table = pa.table({{"part": [n % 4 for n in range(100_000)], "n": range(100_000)}})
        ds.write_dataset(table, "{bucket}/set", filesystem=fs, format="parquet", partitioning=["part"])
        found = ds.dataset("{bucket}/set", filesystem=fs, format="parquet", partitioning=["part"])
        print(found.count_rows(), len(found.files), found.to_table(filter=pc.field("part") == 2).num_rows)
        print(sorted(found.to_table()["n"].to_pylist()) == list(range(100_000)))
        pq.write_table(table, "{bucket}/one.parquet", filesystem=fs, row_group_size=10_000)
        print(pq.ParquetFile(fs.open("{bucket}/one.parquet"), pre_buffer=True).read_row_group(3)["n"][0])
        print(pq.read_table("lake://{bucket}/one.parquet", filesystem=fs).equals(table))
        ds.write_dataset(table, "{bucket}/set", filesystem=fs, format="parquet", partitioning=["part"],
                         existing_data_behavior="delete_matching")
        print(ds.dataset("{bucket}/set", filesystem=fs, partitioning=["part"]).count_rows())
    """
    assert run(fs, body, tmp_path) == "100000 4 25000\nTrue\n30000\nTrue\n100000\n"


def test_datasets_loads_streams_and_saves(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    body = f"""
        import datasets, pandas
        datasets.disable_progress_bars()
        for split in ("train", "test"):
            pandas.DataFrame({{"n": range(1000), "text": ["x" * (n % 9) for n in range(1000)]}}).to_parquet(
                f"lake://{bucket}/data/{{split}}-0.parquet")
        files = {{split: f"lake://{bucket}/data/{{split}}-*.parquet" for split in ("train", "test")}}
        loaded = datasets.load_dataset("parquet", data_files=files)
        print(loaded["train"].num_rows, loaded["test"][999]["n"])
        streamed = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        print(sum(row["n"] for row in streamed))
        loaded["train"].save_to_disk("lake://{bucket}/saved")
        print(datasets.load_from_disk("lake://{bucket}/saved").num_rows)
        loaded.save_to_disk("lake://{bucket}/saved-both")
        print(datasets.load_from_disk("lake://{bucket}/saved-both")["test"][5]["n"])
    """
    assert run(fs, body, tmp_path) == "1000 999\n499500\n1000\n5\n"


def test_torch_safetensors_and_zarr_keep_arrays(fs: LakeFileSystem, bucket: str, tmp_path: Path) -> None:
    body = f"""
        import fsspec, numpy, torch, zarr
        from safetensors.torch import load, save
        tensors = {{f"layer{{n}}": torch.arange(700_000).float() * n for n in range(9)}}
        with fsspec.open("lake://{bucket}/a.pt", "wb") as file:
            torch.save(tensors, file)
        with fsspec.open("lake://{bucket}/a.pt", "rb") as file:
            found = torch.load(file)
        print(all(torch.equal(found[name], tensors[name]) for name in tensors))
        fs = fsspec.filesystem("lake")
        fs.pipe("{bucket}/a.safetensors", save(tensors))
        print(all(torch.equal(one, tensors[name]) for name, one in load(fs.cat("{bucket}/a.safetensors")).items()))
        array = zarr.create_array("lake://{bucket}/a.zarr", shape=(300, 300), chunks=(100, 100), dtype="f4")
        array[:] = numpy.arange(90_000, dtype="f4").reshape(300, 300)
        print(float(zarr.open_array("lake://{bucket}/a.zarr", mode="r")[150:, 150:].sum()))

        class Samples(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                with fs.open("{bucket}/a.safetensors") as file:
                    file.seek(index * 1000)
                    return len(file.read(100))
        loader = torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=2)
        print(sum(int(batch.sum()) for batch in loader))
    """
    expected = sum(float(row * 300 + column) for row in range(150, 300) for column in range(150, 300))
    first, second, third, fourth = run(fs, body, tmp_path).splitlines()
    assert (first, second, fourth) == ("True", "True", "6400")
    assert float(third) == pytest.approx(expected, rel=1e-5)


CHECKPOINT: Final = """
    import os, signal, sys, warnings, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    warnings.simplefilter("ignore")  # a single process is meant
    rank, world, place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["PLACE"]
    if world > 1:
        dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=world)

    def state(seed, changed=1.0):
        made = {}
        for n in range(20):
            at = 0 if n >= 20 * changed else seed
            generator = torch.Generator().manual_seed(1000 * at + n + (100 * rank if world > 1 else 0))
            made[f"rank{rank}/layer{n}"] = torch.randn(1 << 19, generator=generator)
        return made

    def same(seed, checkpoint, changed=1.0):
        wanted = state(seed, changed)
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        dcp.load(found, checkpoint_id=checkpoint)
        return all(torch.equal(found[name], wanted[name]) for name in wanted)
"""


def _ranks(fs: LakeFileSystem, body: str, folder: Path, place: str, world: int) -> list[tuple[int, str]]:
    """Run a program in each rank of a job; return the exit codes and outputs."""
    program = textwrap.dedent(CHECKPOINT) + textwrap.dedent(body)
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    common = environment(fs.server) | {"PLACE": place, "WORLD_SIZE": str(world), "MEETING": str(meeting)}
    ranks = [
        subprocess.Popen(
            [str(PYTHON), "-c", program],
            env=common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(world)
    ]
    ended = []
    for rank in ranks:
        out, _ = rank.communicate(timeout=LIMIT_S)
        ended.append((rank.returncode, out))
    return ended


def test_a_second_checkpoint_with_5_percent_changed_stores_few_new_bytes(
    fs: LakeFileSystem, bucket: str, tmp_path: Path
) -> None:
    """20 tensors of 2 MiB, one of which is changed: a checkpoint of 40 MiB, 2 MiB of it new."""
    save = """
        from lakefs.put.pieces import PiecewisePut
        commit = PiecewisePut.commit
        def noted(self, change):
            result = yield from commit(self, change)
            print(result.size_bytes, result.new_bytes)
            return result
        PiecewisePut.commit = noted
        dcp.save(state(1, {0}), checkpoint_id=place + "/{1}")
        print(same(1, place + "/{1}", {0}))
    """
    place = f"lake://{bucket}/steps"
    new = []
    for step, changed in enumerate((0, 0.05)):
        ((code, out),) = _ranks(fs, save.format(changed, step), tmp_path, place, 1)
        assert (code, out.splitlines()[1:]) == (0, ["True"]), out
        size, fresh = map(int, out.splitlines()[0].split())
        assert size > 40 << 20
        new.append(fresh)
    assert new[0] > 40 << 20
    assert 2 << 20 <= new[1] <= (2 << 20) + 2 * CHUNK_BYTES  # what changed, and the rest of the chunks that it is in


def test_a_rank_killed_during_a_save_leaves_the_old_checkpoint_whole(
    fs: LakeFileSystem, bucket: str, tmp_path: Path
) -> None:
    place = f"lake://{bucket}/run"
    save = 'dcp.save(state(1), checkpoint_id=place + "/1")\nprint(same(1, place + "/1"))'
    ended = _ranks(fs, save, tmp_path, place, 2)
    assert [code for code, _ in ended] == [0, 0], ended
    assert all(out.endswith("True\n") for _, out in ended)
    killed = """
        from lakefs.plugins.fsspec.writer import LakeWriter
        write, written = LakeWriter.write, 0
        def writes_until_killed(self, data):
            global written
            written += len(data)
            if rank == 1 and written > 25 << 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, data)
        LakeWriter.write = writes_until_killed
        dcp.save(state(2), checkpoint_id=place + "/2")
    """
    ended = _ranks(fs, killed, tmp_path, place, 2)
    assert ended[1][0] == -9
    assert ended[0][0] != 0
    assert not fs.exists(f"{bucket}/run/2/.metadata")
    assert not fs.exists(f"{bucket}/run/2/__1_0.distcp")
    ended = _ranks(fs, 'print(same(1, place + "/1"))', tmp_path, place, 2)
    assert all((code, out.endswith("True\n")) == (0, True) for code, out in ended), ended


def test_a_save_over_a_checkpoint_that_is_killed_leaves_the_old_one(
    fs: LakeFileSystem, bucket: str, tmp_path: Path
) -> None:
    place = f"lake://{bucket}/one"
    assert _ranks(fs, "dcp.save(state(1), checkpoint_id=place)", tmp_path, place, 1)[0][0] == 0
    killed = """
        from lakefs.plugins.fsspec.writer import LakeWriter
        def killed(self):
            os.kill(os.getpid(), signal.SIGKILL)
        LakeWriter.close = killed
        dcp.save(state(2), checkpoint_id=place)
    """
    assert _ranks(fs, killed, tmp_path, place, 1)[0][0] == -9
    assert _ranks(fs, "print(same(1, place))", tmp_path, place, 1)[0] == (0, "True\n")


def test_the_environment_is_the_locked_one() -> None:
    lock = (ROOT / "requirements/plugins-fsspec.txt").read_text().splitlines()
    wanted = {line.lower().replace("_", "-") for line in lock if not line.startswith("#")}
    freeze = [str(PYTHON), "-m", "pip", "freeze", "--disable-pip-version-check"]
    done = subprocess.run(freeze, capture_output=True, text=True, env=os.environ)
    found = {line.lower().replace("_", "-").replace("+cpu", "") for line in done.stdout.splitlines()}
    assert wanted - found == set()
