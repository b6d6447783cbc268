"""Real tools on the mount: they must run without errors, and leave what they leave on a local disk.

What was written on one mount is read back through the other, which has only what the store holds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from tests.mount.tools import attributes, catch_up, content, digests, make_tree, need, run

pytestmark = [pytest.mark.slow, pytest.mark.fuse]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree on the local disk."""
    folder = tmp_path / "tree"
    make_tree(folder)
    return folder


def test_cp_a_keeps_content_modes_times_and_symlinks(tree: Path, here: Path, there: Path) -> None:
    run("cp", "-a", tree, here / "copy")
    catch_up(here, there)
    for folder in (here, there):
        assert digests(folder / "copy") == digests(tree)
        assert attributes(folder / "copy") == attributes(tree)


def test_cp_a_out_of_the_mount_gives_the_same_tree(tree: Path, here: Path, there: Path, tmp_path: Path) -> None:
    run("cp", "-a", tree, here / "copy")
    catch_up(here, there)
    run("cp", "-a", there / "copy", tmp_path / "back")
    assert digests(tmp_path / "back") == digests(tree)
    assert attributes(tmp_path / "back") == attributes(tree)


def test_tar_rsync_and_cp_keep_pipes_sockets_and_devices(tree: Path, here: Path, there: Path, tmp_path: Path) -> None:
    need("rsync")
    os.mkfifo(tree / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "socket"))
    if os.geteuid() == 0:
        os.mknod(tree / "null", 0o20620, os.makedev(1, 3))
        os.mknod(tree / "disk", 0o60600, os.makedev(259, 300))
    run("cp", "-a", tree, here / "cp")
    run("rsync", "-a", "--devices", "--specials", f"{tree}/", here / "rsync")
    run("tar", "-C", tree, "-cf", tmp_path / "out.tar", "--exclude=./socket", ".")
    (here / "tar").mkdir()
    run("tar", "-C", here / "tar", "-xpf", tmp_path / "out.tar")
    catch_up(here, there)

    def nodes(folder: Path) -> dict[str, tuple[int, int, int]]:
        """Return mode, number and time of each special node and symlink; rsync and tar compare seconds."""
        found = {path.name: path.lstat() for path in folder.iterdir()}
        return {
            name: (each.st_mode, each.st_rdev, int(each.st_mtime))
            for name, each in found.items()
            if not (stat.S_ISREG(each.st_mode) or stat.S_ISDIR(each.st_mode))
        }

    packed = nodes(tree)
    del packed["socket"]
    for folder in (here, there):
        assert [nodes(folder / copy) for copy in ("cp", "rsync", "tar")] == [nodes(tree), nodes(tree), packed]
    writer = threading.Thread(target=lambda: (here / "cp" / "pipe").write_bytes(b"through"))
    writer.start()
    assert (here / "cp" / "pipe").read_bytes() == b"through"
    writer.join()
    run("rsync", "-a", "--devices", "--specials", f"{there}/rsync/", tmp_path / "back")
    assert nodes(tmp_path / "back") == nodes(tree)


def test_cp_within_the_mount_and_over_existing_files(tree: Path, here: Path, there: Path) -> None:
    run("cp", "-a", tree, here / "first")
    run("cp", "-r", here / "first", here / "second")
    run("cp", here / "first" / "large", here / "second" / "d0" / "file 0 ü")
    catch_up(here, there)
    assert (there / "second" / "d0" / "file 0 ü").read_bytes() == (tree / "large").read_bytes()
    run("diff", "-r", "--no-dereference", here / "first", tree)


def test_mv_within_into_and_out_of_the_mount(tree: Path, here: Path, there: Path, tmp_path: Path) -> None:
    expected = digests(tree)
    run("cp", "-a", tree, tmp_path / "moved")
    run("mv", tmp_path / "moved", here / "in")
    run("mv", here / "in", here / "within")
    run("mv", here / "within" / "large", here / "within" / "d1" / "file 1 ü")
    run("mv", here / "within" / "d1" / "file 1 ü", here / "within" / "large")
    catch_up(here, there)
    assert not (there / "in").exists()
    run("mv", here / "within", tmp_path / "out")
    left = digests(tmp_path / "out")
    assert left == {name: digest for name, digest in expected.items() if name != "d1/file 1 ü"}
    assert os.listdir(here) == []


def test_rsync_copies_updates_and_deletes(tree: Path, here: Path, there: Path) -> None:
    need("rsync")
    target = here / "copy"
    run("rsync", "-a", "--delete", f"{tree}/", target)
    catch_up(here, there)
    assert digests(there / "copy") == digests(tree)
    assert run("rsync", "-a", "--delete", "-i", "--omit-dir-times", f"{tree}/", target) == ""
    (tree / "large").write_bytes(content(300_000, 9))
    (tree / "d0" / "file 0 ü").unlink()
    run("rsync", "-a", "--delete", f"{tree}/", target)
    catch_up(here, there)
    assert digests(there / "copy") == digests(tree)
    (tree / "large").write_bytes(content(300_000, 9)[:-5] + b"12345")
    run("rsync", "-a", "--inplace", "--no-whole-file", f"{tree}/", target)
    (tree / "large").write_bytes(content(300_000, 9) + b"appended")
    run("rsync", "-a", "--append-verify", f"{tree}/", target)
    run("rsync", "-a", "--sparse", "--checksum", f"{tree}/", target)
    catch_up(here, there)
    assert digests(there / "copy") == digests(tree)


def test_tar_writes_an_archive_and_unpacks_one(tree: Path, here: Path, there: Path) -> None:
    run("tar", "--format=posix", "-cf", here / "tree.tar", "-C", tree, ".")
    (here / "unpacked").mkdir()
    catch_up(here, there)
    run("tar", "xpf", there / "tree.tar", "-C", here / "unpacked")
    assert digests(there / "unpacked") == digests(tree)
    assert attributes(there / "unpacked") == attributes(tree)
    run("tar", "czf", here / "again.tgz", "-C", here / "unpacked", ".")
    catch_up(here, there)
    assert len(run("tar", "tzf", there / "again.tgz").splitlines()) == len(digests(tree)) + 1
    run("tar", "-rf", here / "tree.tar", "-C", tree, "large")
    run("tar", "df", here / "tree.tar", "-C", tree)


def test_git_clones_commits_and_finds_nothing_wrong(here: Path, there: Path, tmp_path: Path) -> None:
    need("git")
    origin = tmp_path / "origin"
    make_tree(origin)
    run("git", "init", "-q", "-b", "main", cwd=origin)
    run("git", "add", ".", cwd=origin)
    run("git", "commit", "-q", "-m", "first", cwd=origin)
    clone = here / "clone"
    run("git", "clone", "-q", "--no-hardlinks", origin, clone)
    assert run("git", "status", "--porcelain", cwd=clone) == ""
    (clone / "new").write_bytes(content(10_000))
    (clone / "large").write_bytes(b"changed")
    run("git", "add", "-A", cwd=clone)
    run("git", "commit", "-q", "-m", "second", cwd=clone)
    run("git", "checkout", "-q", "-b", "side", "HEAD~1", cwd=clone)
    (clone / "d0" / "side").write_text("side")
    run("git", "add", "-A", cwd=clone)
    run("git", "commit", "-q", "-m", "third", cwd=clone)
    run("git", "merge", "-q", "-m", "merged", "main", cwd=clone)
    run("git", "gc", "-q", cwd=clone)
    run("git", "fsck", "--strict", cwd=clone)
    run("git", "push", "-q", "origin", "side", cwd=clone)
    catch_up(here, there)
    run("git", "fsck", "--strict", cwd=there / "clone")
    catch_up(here, there)
    assert run("git", "status", "--porcelain", cwd=there / "clone") == ""
    assert (there / "clone" / "large").read_bytes() == b"changed"


def test_git_works_in_a_repository_born_on_the_mount(here: Path, there: Path, tmp_path: Path) -> None:
    need("git")
    run("git", "init", "-q", "-b", "main", here / "bare.git", "--bare")
    run("git", "clone", "-q", here / "bare.git", here / "work")
    for number in range(3):
        (here / "work" / "file").write_text(f"{number}\n")
        run("git", "add", "file", cwd=here / "work")
        run("git", "commit", "-q", "-m", f"{number}", cwd=here / "work")
    run("git", "push", "-q", "origin", "HEAD:main", cwd=here / "work")
    catch_up(here, there)
    run("git", "clone", "-q", there / "bare.git", tmp_path / "again")
    assert (tmp_path / "again" / "file").read_text() == "2\n"
    run("git", "rebase", "-q", "--root", "--exec", "true", cwd=here / "work")
    run("git", "stash", "list", cwd=here / "work")


def test_sqlite_with_a_rollback_journal_and_a_reader_beside_the_writer(here: Path, there: Path) -> None:
    need("sqlite3")
    base = here / "base.sqlite"
    run("sqlite3", base, "pragma journal_mode = delete; create table t (n integer primary key, x blob);")
    for start in (0, 500, 1000):
        rows = f"with recursive c(n) as (select {start} union all select n + 1 from c limit 500)"
        run("sqlite3", base, f"{rows} insert into t select n, randomblob(300) from c;")
    assert run("sqlite3", base, "select count(*), sum(length(x)) from t;") == "1500|450000\n"
    writer = sqlite3.connect(base, isolation_level=None, timeout=30)
    reader = sqlite3.connect(base, timeout=30)
    writer.execute("begin immediate")
    writer.execute("delete from t where n < 700")
    assert reader.execute("select count(*) from t").fetchone() == (1500,)
    writer.execute("rollback")
    writer.execute("begin")
    writer.execute("delete from t where n < 100")
    writer.execute("commit")
    assert reader.execute("select count(*) from t").fetchone() == (1400,)
    writer.execute("vacuum")
    reader.close()
    writer.close()
    catch_up(here, there)
    for folder in (here, there):
        assert run("sqlite3", folder / "base.sqlite", "pragma integrity_check;") == "ok\n"


@pytest.mark.parametrize("mode", ["truncate", "persist", "memory"])
def test_sqlite_with_other_journals(here: Path, there: Path, mode: str) -> None:
    base = sqlite3.connect(here / "base", isolation_level=None)
    assert base.execute(f"pragma journal_mode = {mode}").fetchone() == (mode,)
    base.execute("create table t (x)")
    for number in range(20):
        base.execute("insert into t values (?)", (content(3000, number),))
    base.close()
    again = sqlite3.connect(there / "base")
    assert again.execute("select count(*), sum(length(x)) from t").fetchone() == (20, 60_000)
    again.close()


def test_an_editor_saves_by_backup_temporary_file_and_rename(here: Path, there: Path) -> None:
    document = here / "document"
    document.write_text("first\n")
    for version in ("second\n", "third, longer\n", "4\n"):
        document.replace(here / "document~")
        descriptor = os.open(document, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        os.write(descriptor, version.encode())
        os.fsync(descriptor)
        os.close(descriptor)
        temporary = here / ".document.swp"
        temporary.write_text(version * 2)
        os.replace(temporary, document)
        catch_up(here, there)
        assert document.read_text() == (there / "document").read_text() == version * 2
    assert sorted(os.listdir(there)) == ["document", "document~"]


def test_vim_saves(here: Path, there: Path, tmp_path: Path) -> None:
    need("vim")
    for folder in (here, tmp_path):
        (folder / "text").write_text("one\ntwo\n")
        for option in ("set nowritebackup", "set backup backupcopy=yes", "set backup backupcopy=no"):
            commands = ("-c", option, "-c", "set fsync", "-c", "normal Gothree", "-c", "wq")
            run("vim", "-u", "NONE", "-es", *commands, folder / "text")
    catch_up(here, there)
    assert (there / "text").read_text() == "one\ntwo\nthree\nthree\nthree\n"
    assert digests(there) == digests(tmp_path)


def test_sha256sum_find_and_du_see_the_whole_tree(tree: Path, here: Path, there: Path) -> None:
    run("cp", "-a", tree, here / "copy")
    sums = run("sh", "-c", "find . -type f -print0 | sort -z | xargs -0 sha256sum", cwd=tree)
    (here / "sums").write_text(sums)
    catch_up(here, there)
    run("sha256sum", "--quiet", "-c", there / "sums", cwd=there / "copy")
    for what in (("-type", "f"), ("-type", "d"), ("-type", "l"), ("-perm", "600"), ("-size", "+1k"), ("-empty",)):
        local = run("find", ".", *what, cwd=tree).splitlines()
        catch_up(here, there)
        assert sorted(run("find", ".", *what, cwd=there / "copy").splitlines()) == sorted(local)
    apparent = ("du", "-sb", "--apparent-size")
    files = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    catch_up(here, there)
    assert int(run(*apparent, there / "copy").split()[0]) >= files
    assert int(run("du", "-s", "--block-size=1", there / "copy").split()[0]) >= files // 2
    run("df", here)
    run("rm", "-r", here / "copy")
    catch_up(here, there)
    assert os.listdir(there) == ["sums"]


def _dd(source: Path, target: Path, *options: str, code: int = 0) -> None:
    run("dd", f"if={source}", f"of={target}", "status=none", *options, code=code)


@pytest.mark.parametrize(
    "options",
    [
        ("bs=4k",), ("bs=1M",), ("bs=777",), ("bs=1M", "oflag=direct"), ("bs=64k", "oflag=sync"),
        ("bs=64k", "oflag=dsync"), ("bs=1M", "oflag=nonblock"), ("bs=1M", "oflag=nofollow"),
        ("bs=1M", "oflag=noatime"), ("bs=1M", "oflag=nocache"), ("bs=1M", "conv=fsync"),
        ("bs=1M", "conv=fdatasync"), ("bs=1M", "conv=excl"), ("bs=1M", "oflag=append"), ("bs=1M", "conv=sparse"),
        ("bs=1M", "conv=notrunc"), ("bs=1M", "iflag=fullblock"), ("ibs=4k", "obs=1M"), ("ibs=1M", "obs=4k"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_dd_writes_with_every_flag(here: Path, there: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    source = tmp_path / "source"
    source.write_bytes(content(2 << 20) + bytes(1 << 20) + content(1 << 20, 2))
    _dd(source, here / "target", *options)
    catch_up(here, there)
    assert (there / "target").read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ("bs=1M", "iflag=direct"), ("bs=64k", "iflag=sync"), ("bs=1M", "iflag=nocache"), ("bs=999",),
        ("bs=1M", "iflag=noatime"), ("bs=4k", "iflag=direct"), ("bs=1M", "iflag=nofollow"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_dd_reads_with_every_flag(here: Path, there: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    (here / "source").write_bytes(content((2 << 20) + 4096))
    catch_up(here, there)
    for folder in (here, there):
        _dd(folder / "source", tmp_path / "copy", *options)
        assert (tmp_path / "copy").read_bytes() == content((2 << 20) + 4096)


def test_dd_appends_excludes_patches_and_refuses(here: Path, there: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", here / "target"
    source.write_bytes(content(10_000))
    _dd(source, target, "conv=nocreat", code=1)
    assert not target.exists()
    _dd(source, target)
    _dd(source, target, "conv=excl", code=1)
    _dd(source, target, "oflag=append", "conv=notrunc")
    catch_up(here, there)
    assert (there / "target").read_bytes() == content(10_000) * 2
    _dd(source, target, "bs=100", "seek=50", "skip=1", "count=2", "conv=notrunc,nocreat")
    expected = bytearray(content(10_000) * 2)
    expected[5000:5200] = content(10_000)[100:300]
    catch_up(here, there)
    assert (there / "target").read_bytes() == expected
    _dd(source, target, "bs=100", "seek=300", "count=1", "conv=notrunc")
    catch_up(here, there)
    assert (there / "target").read_bytes() == expected + bytes(10_000) + content(10_000)[:100]
    _dd(source, target, "bs=1", "seek=10", "count=0")
    catch_up(here, there)
    assert (there / "target").read_bytes() == expected[:10]
    (here / "link").symlink_to("target")
    _dd(source, here / "link", "oflag=nofollow", code=1)
    _dd(here, tmp_path / "no", "iflag=directory", code=1)


FIO = (
    "--verify=crc32c",
    "--verify_fatal=1",
    "--randrepeat=1",
    "--size=4M",
    "--output-format=terse",
    "--verify_state_save=0",
)


@pytest.mark.parametrize(
    "job",
    [
        ("--rw=write", "--bs=64k"),
        ("--rw=write", "--bs=4k", "--fsync=64"),
        ("--rw=randwrite", "--bs=4k"),
        ("--rw=randwrite", "--bs=4k", "--fdatasync=32"),
        ("--rw=randwrite", "--bssplit=512/20:3k/30:64k/50", "--bs_unaligned=1", "--verify_interval=512"),
        ("--rw=randrw", "--bs=8k", "--end_fsync=1"),
        ("--rw=randwrite", "--bs=4k", "--ioengine=mmap"),
        ("--rw=write", "--bs=64k", "--direct=1"),
        ("--rw=randwrite", "--bs=4k", "--direct=1", "--ioengine=libaio", "--iodepth=8"),
        ("--rw=randwrite", "--bs=16k", "--numjobs=3", "--ioengine=psync"),
        ("--rw=randwrite", "--bs=4k", "--overwrite=1"),
    ],
    ids=" ".join,
)
def test_fio_verifies_what_it_wrote(here: Path, there: Path, job: tuple[str, ...]) -> None:
    need("fio")
    run("fio", "--name=job", f"--directory={here}", *FIO, *job)
    if "--numjobs=3" not in job:
        catch_up(here, there)
        run("fio", "--name=job", f"--directory={there}", *FIO, *job, "--verify_only")


def test_a_command_runs_from_the_mount(here: Path, there: Path) -> None:
    script = here / "script"
    script.write_text('#!/bin/sh\necho ran "$@"\n')
    script.chmod(0o755)
    catch_up(here, there)
    assert run(there / "script", "well") == "ran well\n"
    shutil.copy2("/bin/true", here / "true")
    catch_up(here, there)
    run(there / "true")


@pytest.mark.parametrize("count", [300, pytest.param(1500, marks=pytest.mark.thorough)])
def test_many_small_files_come_back_from_one_listing(here: Path, there: Path, count: int) -> None:
    names = [f"n{number:04}" for number in range(count)]
    for name in names:
        (here / name).write_bytes(name.encode())
    catch_up(here, there)
    assert sorted(os.listdir(there)) == names
    listed = run("ls", "-lU", there).splitlines()
    assert len(listed) == len(names) + 1
    joined = hashlib.sha256(b"".join((there / name).read_bytes() for name in names)).hexdigest()
    assert joined == hashlib.sha256("".join(names).encode()).hexdigest()


def test_posix_fallocate_truncate_and_flock_commands(here: Path, there: Path) -> None:
    path = here / "file"
    path.write_bytes(b"12345")
    descriptor = os.open(path, os.O_RDWR)
    os.posix_fallocate(descriptor, 0, 10_000)
    os.close(descriptor)
    catch_up(here, there)
    assert (there / "file").read_bytes() == b"12345" + bytes(9995)
    run("truncate", "-s", "3", path)
    run("truncate", "-s", "+2", path)
    catch_up(here, there)
    assert (there / "file").read_bytes() == b"123\0\0"
    run("flock", path, "true")
    catch_up(here, there)
    run("cmp", path, there / "file")
    run("touch", "-d", "2001-02-03 04:05:06.123456789 UTC", path)
    catch_up(here, there)
    assert path.stat().st_mtime_ns == (there / "file").stat().st_mtime_ns == 981_173_106_123_456_789
