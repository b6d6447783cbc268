"""When others see what is written: at the close of the program that opened the file, not at each close of a copy.

The bucket keeps versions, so that each commit of a file is one: the tests count them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from lakefs.client.blocking.engine import connect_blocking
from tests.e2e.served import LAKE
from tests.mount.commits import HALF, REST, Sizes, keep_versions, version_sizes
from tests.mount.mounts import lake
from tests.mount.test_two_mounts import eventually
from tests.mount.tools import need, run

pytestmark = pytest.mark.fuse


def python(text: str, *arguments: Path | str) -> None:
    """Run a program of Python."""
    run(sys.executable, "-c", dedent(text), *arguments)


# --- shells ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/bin/echo one > file", [4]),
        ("(/bin/echo one; /bin/echo two) > file", [8]),
        ("{ /bin/echo one; /bin/echo two; } > file", [8]),
        ("for each in 0 1 2 3 4 5 6 7 8 9; do /bin/echo $each; done > file", [20]),
        ("/bin/echo one > file; /bin/echo two >> file", [4, 8]),
        ("exec > file; /bin/echo one; /bin/echo two; exec >&2; test $(cat file | wc -l) = 2", [8]),
        ("/bin/echo one | cat > file", [4]),
        ("(/bin/echo one; exec /bin/echo two) > file", [8]),
        ("exec 3> file; /bin/echo one >&3; (/bin/echo two >&3) & wait; exec 3>&-", [8]),
    ],
    ids=["program", "subshell", "group", "loop", "two", "exec", "pipe", "last", "background"],
)
def test_a_redirect_is_one_commit(here: Path, sizes: Sizes, shell: str, script: str, expected: list[int]) -> None:
    need(shell)
    run(shell, "-c", script, cwd=here)
    assert sizes(here / "file") == expected


# --- children beside a writer ----------------------------------------------------------------------------


def test_no_child_of_a_writer_commits_what_it_has_not_closed(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    with file.open("wb", buffering=0) as opened:
        subprocess.run(["true"], check=True)
        opened.write(HALF)
        subprocess.run(["true"], check=True)
        subprocess.run(["true"], check=True, pass_fds=[opened.fileno()])
        copies = f"true >&{opened.fileno()}; (true) 2>&{opened.fileno()}; true"
        subprocess.run(["bash", "-c", copies], check=True, pass_fds=[opened.fileno()])
        assert sizes(file) == []
        opened.write(REST)
    assert sizes(file) == [len(HALF + REST)]


def test_what_a_child_writes_is_committed_by_the_close_of_the_program_that_opened(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    with file.open("wb", buffering=0) as opened:
        for _ in range(10):
            subprocess.run(["/bin/echo", "line"], check=True, stdout=opened)
        assert sizes(file) == []
    assert sizes(file) == [50]


def test_a_fork_that_ends_commits_nothing_of_its_parent(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    python(
        """
        import os, sys
        descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"half")
        for _ in range(3):
            if not (child := os.fork()):
                os.write(descriptor, b"more")
                os._exit(0)
            os.waitpid(child, 0)
        """,
        file,
    )
    assert sizes(file) == [16]


def test_what_a_daemon_writes_is_committed_at_each_close_once_its_parent_has_ended(here: Path, sizes: Sizes) -> None:
    file, told = here / "file", here / "told"
    python(
        """
        import os, sys, time
        descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"parent")
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.01)
        for _ in range(2):
            os.write(descriptor, b"daemon")
            os.close(os.dup(descriptor))
        os.mkdir(sys.argv[2])
        """,
        file,
        told,
    )
    eventually(told.exists, "the daemon does not end")
    assert sizes(file) == [6, 12, 18]


def test_a_parent_that_has_closed_its_own_leaves_the_commit_to_its_child(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    with file.open("wb", buffering=0) as opened:
        child = subprocess.Popen(["sh", "-c", "read -r go; /bin/echo child"], stdin=subprocess.PIPE, stdout=opened)
        opened.write(b"parent\n")
    assert sizes(file) == [7], "its own close is a close"
    child.communicate(b"go\n", timeout=60)
    assert sizes(file)[-1] == 13


# --- duplicates, threads, exec ---------------------------------------------------------------------------


def test_the_last_descriptor_of_the_program_commits(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    first = os.open(file, os.O_WRONLY | os.O_CREAT)
    second, third = os.dup(first), os.dup(first)
    os.write(first, HALF)
    os.close(first)
    os.close(third)
    assert sizes(file) == []
    os.write(second, REST)
    os.dup2(2, second)
    assert sizes(file) == [len(HALF + REST)]
    os.close(second)


def test_a_path_descriptor_keeps_no_file_open(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    path_only = os.open(file, os.O_PATH)
    os.write(descriptor, HALF)
    os.close(descriptor)
    assert sizes(file) == [len(HALF)]
    os.close(path_only)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_two_handles_of_one_program_commit_each_at_its_own_close(here: Path, sizes: Sizes, flags: int) -> None:
    file = here / "file"
    one, other = os.open(file, flags | os.O_CREAT), os.open(file, flags)
    os.pwrite(one, HALF, 0)
    os.close(one)
    assert sizes(file) == [len(HALF)]
    os.pwrite(other, REST, len(HALF))
    assert sizes(file) == [len(HALF)]
    os.close(other)
    assert sizes(file) == [len(HALF), len(HALF + REST)]


def test_one_program_that_has_a_file_open_on_two_mounts_commits_each_at_its_close(
    here: Path, there: Path, sizes: Sizes
) -> None:
    file = here / "file"
    file.write_bytes(b"first")
    eventually((there / "file").exists, "the new name is not seen")
    one, other = os.open(file, os.O_WRONLY), os.open(there / "file", os.O_WRONLY)
    os.write(one, HALF)
    os.write(other, REST + HALF)
    os.close(one)
    assert sizes(file)[-1] == len(HALF)
    os.close(other)
    assert sizes(file)[-1] == len(REST + HALF)


def test_a_file_is_closed_by_another_thread_than_the_one_that_opened_it(here: Path, sizes: Sizes) -> None:
    file, opened = here / "file", []

    def open_it() -> None:
        opened.append(os.open(file, os.O_WRONLY | os.O_CREAT))

    def in_a_thread(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    in_a_thread(open_it)
    (descriptor,) = opened
    in_a_thread(lambda: os.write(descriptor, HALF))
    in_a_thread(lambda: os.close(os.dup(descriptor)))
    subprocess.run(["true"], check=True, pass_fds=[descriptor])
    assert sizes(file) == []
    os.write(descriptor, REST)
    in_a_thread(lambda: os.close(descriptor))
    assert sizes(file) == [len(HALF + REST)]


def test_a_program_whose_first_thread_has_ended_still_has_its_files(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    python(
        """
        import ctypes, os, subprocess, sys, threading
        descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        first = threading.get_native_id()
        def later():
            while open(f"/proc/{first}/stat").read().rpartition(")")[2].split()[0] != "Z":
                pass
            for _ in range(3):
                os.write(descriptor, b"line")
                os.close(os.dup(descriptor))
                subprocess.run(["true"], pass_fds=[descriptor])
            os._exit(0)
        threading.Thread(target=later).start()
        ctypes.CDLL(None).syscall(60, 0)  # exit(2) of this thread alone
        """,
        file,
    )
    assert sizes(file) == [12]


def test_exec_changes_nothing(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    python(
        """
        import os, sys, threading
        descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        os.write(1, b"half")
        threading.Thread(target=os.execv, args=["/bin/sh", ["sh", "-c", "/bin/echo a; /bin/echo b; true"]]).start()
        threading.Event().wait()
        """,
        file,
    )
    assert sizes(file) == [8]


def test_a_program_with_very_many_files_commits_at_each_close(here: Path, sizes: Sizes) -> None:
    file = here / "file"
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    copies = [os.dup(descriptor)]
    os.write(descriptor, HALF)
    os.close(descriptor)
    assert sizes(file) == []
    others += [os.open("/dev/null", os.O_RDONLY) for _ in range(700)]
    more = [os.dup(0) for _ in range(150)]
    copies.append(os.dup(copies[0]))
    os.close(copies.pop())
    assert sizes(file) == [len(HALF)], "more descriptors than are looked at"
    for each in (*others, *more, *copies):
        os.close(each)


def test_a_mount_that_cannot_see_the_program_commits_at_each_close(short_folder: Path) -> None:
    need("unshare")
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace of processes")
    folder = short_folder / "unseen"
    folder.mkdir()
    program = ["unshare", "--pid", "--fork", "--kill-child", *LAKE]
    with lake(folder, program=program) as mounts, connect_blocking(mounts.served.server) as engine:
        keep_versions(mounts.served)
        here = mounts.folders[0] / "folder"
        here.mkdir()
        descriptor = os.open(here / "file", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, HALF)
        os.close(os.dup(descriptor))
        assert version_sizes(engine, here / "file") == [len(HALF)]
        os.close(descriptor)
        assert version_sizes(engine, here / "file") == [len(HALF)]
        run("umount", mounts.mounts[0].folder)
        mounts.mounts[0].process.wait(60)
