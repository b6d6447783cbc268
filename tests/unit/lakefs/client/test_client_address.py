"""The choice of a client between several sockets, and its message when there is none."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.address import resolve
from lakefs.config import settings as config
from lakefs.errors import EngineUnreachable
from lakefs.transport.sockets import listens


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the sockets `own/lake.sock` and `system`, for a user who is not root and has set nothing."""
    with TemporaryDirectory(prefix="lake-") as folder:
        place = Path(folder)
        (place / "own").mkdir()
        for name in (*config.CLIENT_VARIABLES, "LAKE_SOCKET", "LAKE_DATA", "STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "own"))
        monkeypatch.setattr(config, "DEFAULT_FILE", place / "lake.toml")
        monkeypatch.setattr(config, "SYSTEM_SOCKET", place / "system")
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        yield place


def listener(path: Path) -> socket.socket:
    """Bind a socket that listens."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen(1)
    return made


def test_the_first_that_is_given_is_taken_and_else_the_first_that_listens(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, system = f"unix:{place}/own/lake.sock", f"unix:{place}/system"
    with listener(place / "system"):
        assert resolve(None, None)[0] == system
        with listener(place / "own" / "lake.sock"):
            assert resolve(None, None)[0] == own
        assert resolve(None, None)[0] == system, "a file that an engine left"
        (place / "lake.toml").write_text('socket = "/file"\n')
        assert resolve(None, None)[0] == "unix:/file"
        monkeypatch.setenv("LAKE_SOCKET", "/variable")
        assert resolve(None, None)[0] == "unix:/variable"
        monkeypatch.setenv("LAKE_SERVER", "unix:/server")
        assert resolve(None, None)[0] == "unix:/server"
        assert resolve("unix:/given", None)[0] == "unix:/given"


def test_the_sentence_for_none_has_each_of_them_and_why(place: Path) -> None:
    listener(place / "system").close()
    with pytest.raises(EngineUnreachable) as told:
        resolve(None, None)
    assert told.value.message == (
        f"no engine was found: your own socket {place}/own/lake.sock is not there, and the system's socket "
        f"{place}/system has nothing that listens; start one with: lake serve, or name one with --server or LAKE_SERVER"
    )


def test_who_has_only_the_system_s_socket_is_not_kept_from_waiting_for_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "SYSTEM_SOCKET", place / "own" / "lake.sock")
    assert resolve(None, None)[0] == f"unix:{place}/own/lake.sock"


def test_a_socket_listens_from_listen_to_close(place: Path) -> None:
    path = str(place / "system")
    assert not listens(path)
    with listener(place / "system"):
        assert listens(path)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
        assert errno.EAGAIN in [each.connect_ex(path) for each in waiting], "its backlog is full"
        assert listens(path)
        for each in waiting:
            each.close()
    assert not listens(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take rights away from itself")
def test_what_a_user_may_not_connect_to_is_known_to_listen(place: Path) -> None:
    path = str(place / "own" / "lake.sock")
    (place / "own").chmod(0)
    for made, expected in ((listener(place / "own" / "lake.sock"), True), (None, False)):
        if made is None:
            (place / "own" / "lake.sock").unlink()
        child = os.fork()
        if not child:
            os.setresuid(4711, 4711, 4711)
            os._exit(int(listens(path)))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == expected
        if made is not None:
            made.close()
