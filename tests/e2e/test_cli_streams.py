"""Standard streams that are closed, targets that are no files, and locales that are not UTF-8."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.served import LAKE, Served, environment

pytestmark = pytest.mark.thorough

COMMAND: Final = " ".join(LAKE)
CLOSINGS: Final = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
ODD: Final = "ä-Ω-名"


def shell(served: Served, line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `lake` is the command line."""
    script = f'set -o pipefail; lake() {{ {COMMAND} "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, cwd=folder, env=environment(served.server) | variables, timeout=60
    )


# --- closed descriptors --------------------------------------------------------------------------------


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_command_works_whichever_of_its_streams_are_closed(served: Served, tmp_path: Path, closing: str) -> None:
    (tmp_path / "f").write_bytes(b"content of a file")
    for line in (f"lake put f closed/k {closing}", f"lake get closed/k g {closing}", f"lake ls closed {closing}"):
        done = shell(served, line, tmp_path)
        assert done.returncode == 0, (line, done)
    assert (tmp_path / "g").read_bytes() == b"content of a file"
    assert served.good("cat", "closed/k").out == b"content of a file"
    assert shell(served, f"lake get closed/none g {closing}", tmp_path).returncode == 66
    assert shell(served, f"lake nonsense {closing}", tmp_path).returncode == 2


def test_content_is_neither_read_from_nor_written_to_a_closed_stream(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "closed/content", stdin=b"content")
    for line, stream in (
        ("lake put - closed/from-nowhere <&-", "stdin"),
        ("lake cat closed/content >&-", "stdout"),
        ("lake get closed/content - >&-", "stdout"),
        ("lake get closed/content /dev/stdout >&-", "stdout"),
    ):
        done = shell(served, line, tmp_path)
        assert done.returncode == 74, (line, done)
        assert f"{stream} is closed".encode() in done.stderr
        assert b"bug" not in done.stderr
    assert served("stat", "closed/from-nowhere").code == 66


def test_an_engine_serves_without_any_standard_stream(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    line = f"exec {COMMAND} serve --data {tmp_path}/data --socket {socket} --admin off --s3 off <&- >&- 2>&-"
    engine = subprocess.Popen(["bash", "-c", line], env=environment())
    try:
        status = "until test -S socket; do kill -0 $ENGINE || exit 9; sleep 0.05; done"
        served_by = environment(f"unix:{socket}") | {"ENGINE": str(engine.pid)}
        subprocess.run(["bash", "-c", status], cwd=tmp_path, env=served_by, check=True, timeout=60)
        for descriptor in range(3):
            assert os.readlink(f"/proc/{engine.pid}/fd/{descriptor}") == "/dev/null"
        done = subprocess.run([*LAKE, "status", "--json"], env=served_by, capture_output=True, check=True, timeout=60)
        assert json.loads(done.stdout)["state"] == "serving"
    finally:
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0


def test_mount_lake_answers_without_any_standard_stream(served: Served, tmp_path: Path) -> None:
    script = f"{sys.executable} -c 'import cli.mount_lake; cli.mount_lake.main()'"
    assert shell(served, f"{script} -f lake {tmp_path} <&- >&- 2>&-", tmp_path).returncode == 0
    assert shell(served, f"{script} wrong {tmp_path} <&- >&- 2>&-", tmp_path).returncode == 2


# --- targets that are no files -------------------------------------------------------------------------


def test_a_get_to_a_stream_is_its_content_and_nothing_else(served: Served, tmp_path: Path) -> None:
    content = os.urandom(5 << 20)
    served.good("put", "-", "streams/k", stdin=content)
    for line in (
        "lake get streams/k /dev/stdout | cat",
        "lake get streams/k /dev/fd/1 | cat",
        "lake get streams/k /proc/self/fd/1 | cat",
        "lake get streams/k /dev/fd/7 7>&1 >/dev/null | cat",
        "mkfifo fifo; lake get -q streams/k fifo & cat fifo; wait $!",
        "ln -s /dev/stdout link; lake get streams/k link | cat",
        "lake get -q streams/k >(cat)",
        "lake get streams/k /dev/stdout > out && cat out",
        "lake get streams/k /dev/null >&2 && lake cat streams/k",
    ):
        done = shell(served, line, tmp_path)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout == content, (line, len(done.stdout))
    assert (tmp_path / "link").is_symlink()
    assert Path("/dev/null").is_char_device()


def test_a_get_to_a_redirected_stdout_keeps_the_file_and_what_it_holds(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "streams/appended", stdin=b"content")
    (tmp_path / "out").write_bytes(b"before ")
    inode = (tmp_path / "out").stat().st_ino
    assert shell(served, "lake get streams/appended /dev/stdout >> out", tmp_path).returncode == 0
    assert (tmp_path / "out").read_bytes() == b"before content"
    assert (tmp_path / "out").stat().st_ino == inode
    removed = shell(served, "exec 5> gone; rm gone; lake get streams/appended /dev/fd/5; ls", tmp_path)
    assert removed.returncode == 0
    assert b"gone" not in removed.stdout.splitlines()[-1]


def test_a_reader_that_ends_early_ends_a_get_to_a_stream_quietly(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "streams/long", stdin=bytes(9 << 20))
    done = shell(served, "lake get streams/long /dev/stdout | head -c 1 > /dev/null; echo ${PIPESTATUS[0]}", tmp_path)
    assert (done.stdout.strip(), done.stderr) == (b"141", b"")


def test_json_and_content_are_not_mixed_on_one_stream(served: Served, tmp_path: Path) -> None:
    served.good("put", "-", "streams/json", stdin=b"content")
    done = shell(served, "lake get --json streams/json /dev/stdout | cat", tmp_path)
    assert done.returncode == 2
    assert done.stdout == b""


# --- locales -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["C", "POSIX", "ascii", "latin"])
def locale(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a locale in which Python would not read arguments as UTF-8, or not of its own accord."""
    if request.param in ("C", "POSIX"):
        return {"LC_ALL": request.param}
    if request.param == "ascii":
        return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "latin-1"}
    if shutil.which("localedef") is None:
        pytest.skip("localedef is not installed")
    place = tmp_path_factory.mktemp("locales")
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(place / "en_US.ISO-8859-1")]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("this machine has no sources of locales")
    return {"LOCPATH": str(place), "LC_ALL": "en_US.ISO-8859-1", "PYTHONUTF8": "0"}


def test_names_of_files_and_keys_are_the_same_in_every_locale(
    served: Served, tmp_path: Path, locale: dict[str, str], request: pytest.FixtureRequest
) -> None:
    bucket = f"locale-{request.node.callspec.params['locale'].lower()}"
    (tmp_path / ODD).write_bytes(b"content")
    (tmp_path / "tree" / ODD).mkdir(parents=True)
    (tmp_path / "tree" / ODD / f"{ODD}.txt").write_bytes(b"below")
    for line in (f"lake put {ODD} {bucket}/{ODD}", f"lake put {ODD} {bucket}/in/", f"lake put -r tree {bucket}/tree"):
        done = shell(served, line, tmp_path, **locale)
        assert done.returncode == 0, done
    keys = [f"in/{ODD}", f"tree/{ODD}/{ODD}.txt", ODD]
    listed = shell(served, f"lake ls -r {bucket}", tmp_path, **locale)
    assert listed.stdout.decode().splitlines() == keys == served.good("ls", "-r", bucket).lines
    told = shell(served, f"lake get --json {bucket}/{ODD} {ODD}.back", tmp_path, **locale)
    assert json.loads(told.stdout.decode())["files"][0]["path"].endswith(f"/{ODD}.back")
    assert (tmp_path / f"{ODD}.back").read_bytes() == b"content"
    assert shell(served, f"lake get -r {bucket}/tree out", tmp_path, **locale).returncode == 0
    assert (tmp_path / "out" / ODD / f"{ODD}.txt").read_bytes() == b"below"
    missing = shell(served, f"lake stat {bucket}/{ODD}.none", tmp_path, **locale)
    assert missing.returncode == 66
    assert f"{bucket}/{ODD}.none" in missing.stderr.decode()


def test_a_file_s_name_that_is_not_utf_8_is_refused_by_name_in_every_locale(
    served: Served, tmp_path: Path, locale: dict[str, str]
) -> None:
    bad = os.fsencode(tmp_path) + b"/tree/\xe4"
    (tmp_path / "tree").mkdir()
    with open(bad, "wb") as file:
        file.write(b"content")
    (tmp_path / "tree" / "good").write_bytes(b"content")
    for line, code in (
        ("lake put tree/$'\\xe4' notutf8/", 2),
        ("lake put tree/good notutf8/$'\\xe4'", 2),
        ("lake put -r tree notutf8/tree", 2),
    ):
        done = shell(served, line, tmp_path, **locale)
        assert done.returncode == code, done
        assert b"not UTF-8" in done.stderr
        assert b"\\xe4" in done.stderr or b"\\udce4" in done.stderr
    assert served.good("ls", "-r", "notutf8").lines == ["tree/good"]
    given = shell(served, "lake put tree/$'\\xe4' notutf8/named && lake rm notutf8/named", tmp_path, **locale)
    assert given.returncode == 0, given  # its content may be stored under another name
