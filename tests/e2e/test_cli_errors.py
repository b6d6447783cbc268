"""Errors of the command line: exit codes, messages, and the engine that it asks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.version import VERSION, commit
from tests.e2e.served import LAKE, ROOT, Served, environment, lake, serving
from tests.served_devices import CYCLES, DEVICES


def test_the_version_is_printed_without_loading_the_client() -> None:
    script = "import sys; from cli.main import run; run(['--version']); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    first, loaded = done.stdout.splitlines()
    assert first == f"lake {VERSION} (commit {commit()})"
    assert not {"trio", "rich", "engine", "lmdb", "msgspec", "lakefs.client"} & set(loaded.split())


def test_stat_loads_no_trio_and_no_engine(served: Served) -> None:
    served.good("put", "-", "loads/x", stdin=b"x")
    script = "import sys; from cli.main import run; run(['stat', 'loads/x']); print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(served.server), check=True
    )
    assert not {"trio", "rich", "engine", "lmdb"} & set(done.stdout.splitlines()[-1].split())


def test_every_command_explains_itself() -> None:
    commands = re.findall(r"^  (\w+)  ", lake("--help").text, re.MULTILINE)
    assert len(commands) > 15
    for command in commands:
        done = lake(command, "--help")
        assert done.code == 0
        assert done.text.startswith("Usage: lake ")


def test_wrong_usage_exits_with_2(served: Served) -> None:
    assert lake("nonsense").code == 2
    assert lake("put").code == 2
    assert lake("ls", "--nonsense").code == 2
    assert served("ls", "/x").code == 2
    assert lake("--server", "nonsense", "ls").code == 2
    wrong = lake("ls", "--json", "--nonsense")
    assert json.loads(wrong.err)["exit_code"] == 2


def test_errors_are_one_line_or_json_on_stderr(served: Served) -> None:
    done = served("stat", "none/x")
    assert (done.code, done.out) == (66, b"")
    assert done.err.startswith("lake: ")
    assert done.err.count("\n") == 1
    found = json.loads(served("stat", "--json", "none/x").err)
    assert (found["error"], found["exit_code"]) == ("BucketNotFound", 66)
    assert "Traceback" in served("--debug", "stat", "none/x").err


def test_nobody_at_the_address_is_told_with_what_to_do() -> None:
    done = lake("ls", server="unix:/tmp/no-such-lake.sock")
    assert done.code == 69
    assert "lake serve" in done.err
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert lake("ls", server=f"tcp://127.0.0.1:{port}").code == 69


def test_the_server_option_beats_the_variable_and_data_beats_both(served: Served, tmp_path: Path) -> None:
    served.good("bucket", "create", "servers")
    nowhere = "unix:/tmp/no-such-lake.sock"
    assert "servers" in lake("--server", served.server, "ls", server=nowhere).lines
    assert "servers" in lake("ls", "--server", served.server, server=nowhere).lines
    assert lake("--data", tmp_path / "s", "put", "-", "here/x", server=nowhere).code == 0
    assert lake("ls", "--server", nowhere, "--data", tmp_path / "s", server=nowhere).lines == ["here"]


def test_a_store_in_use_is_refused(served: Served) -> None:
    for folder in served.folders[:2]:
        done = lake("--data", folder, "ls")
        assert done.code == 75
        assert lake("fsck", "--data", folder).code == 2
        assert lake("gc", "--data", folder).code == 75


def test_a_folder_without_a_store_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    for command in (["ls"], ["gc"], ["get", "a/b", "c"]):
        done = lake("--data", tmp_path / "none", *command)
        assert done.code == 78
        assert "lake serve" in done.err
    assert list(tmp_path.iterdir()) == []


def test_tcp_needs_the_token(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="lake-") as folder, serving(Path(folder), "--native", "127.0.0.1:0") as engine:
        (address,) = [line.split()[1] for line in engine.printed if "tcp://" in line]
        token = engine.folders[0] / "native.token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert lake("ls", server=address).code == 77
        assert lake("--token-file", token, "put", "-", "bkt/x", server=address, stdin=b"x").code == 0
        assert lake("ls", "--token-file", token, server=address).lines == ["bkt"]
        assert lake("--token-file", tmp_path / "none", "ls", server=address).code == 74
        content = os.urandom(9 << 20)
        (tmp_path / "in").write_bytes(content)
        assert lake("--token-file", token, "put", tmp_path / "in", "bkt/y", server=address).code == 0
        assert lake("--token-file", token, "get", "bkt/y", tmp_path / "out", server=address).code == 0
        assert (tmp_path / "out").read_bytes() == content


def test_a_closed_pipe_ends_quietly(served: Served) -> None:
    served.good("put", "-", "closed/x", stdin=bytes(9 << 20))
    for command in ("cat closed/x", "ls -r closed --json", "cat closed/x closed/x"):
        line = f"{' '.join(LAKE)} {command} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(served.server))
        assert done.stderr == ""
        assert done.stdout.strip() in ("0", "141")


def test_a_full_stdout_is_an_error(served: Served) -> None:
    served.good("put", "-", "fullout/x", stdin=b"x")
    for command in (["cat", "fullout/x"], ["ls"], ["stat", "fullout/x"]):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*LAKE, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(served.server)
            )
        assert done.returncode == 74, done
        assert "No space left" in done.stderr


def test_an_interrupted_put_leaves_no_name(served: Served, tmp_path: Path) -> None:
    with (tmp_path / "in").open("wb") as file:
        file.truncate(1 << 35)  # so large that hashing takes longer than all checks of the status
    putting = served.begin("put", tmp_path / "in", "halted/x")
    while not served("status", "--json").out or _sessions(served) == 0:
        assert putting.poll() is None
    putting.send_signal(signal.SIGINT)
    assert putting.wait(60) == 130
    assert served("stat", "halted/x").code == 66


def _sessions(served: Served) -> int:
    found: int = json.loads(served.good("status", "--json").out)["clients"]["sessions"]
    return found


def test_status_doctor_and_config_answer(served: Served, tmp_path: Path) -> None:
    found = json.loads(served.good("status", "--json").out)
    assert (found["state"], found.get("data", "")) == ("serving", "" if DEVICES else str(served.data))
    shown = served.good("status").text
    assert "state" in shown
    assert all(str(folder) in shown for folder in served.folders)
    checks = json.loads(served("doctor", "--data", tmp_path / "none", "--json").out)["checks"]
    assert {check["verdict"] for check in checks} <= {"ok", "warn", "fail"}
    assert {"O_DIRECT", "fallocate", "room"} <= {check["check"] for check in checks}
    assert list(tmp_path.iterdir()) == []
    asked = json.loads(served("doctor", "--json").out)["checks"]
    reads = ["through" in check["detail"] for check in asked if check["check"] == "disk reads"]
    assert reads == ([] if DEVICES else [True]), "a head reads no disk"
    settings = json.loads(lake("config", "--json").out)
    assert settings["origins"]["data"] == "default"
    (tmp_path / "lake.toml").write_text('log_level = "debug"\n')
    assert "debug" in lake("config", "--config", tmp_path / "lake.toml").text
    (tmp_path / "lake.toml").write_text('log_lvl = "debug"\n')
    wrong = lake("config", "--config", tmp_path / "lake.toml")
    assert wrong.code == 78
    assert "log_level" in wrong.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    done = lake("completion", shell)
    assert done.code == 0
    assert "_LAKE_COMPLETE" in done.text


def test_completion_completes_verbs() -> None:
    asked = environment() | {"_LAKE_COMPLETE": "bash_complete", "COMP_WORDS": "lake sta", "COMP_CWORD": "1"}
    done = subprocess.run(LAKE, capture_output=True, text=True, env=asked, cwd=ROOT)
    assert set(done.stdout.split()) == {"plain,stat", "plain,staged", "plain,status"}


def test_gc_frees_what_nothing_names(served: Served) -> None:
    served.good("put", "-", "garbage/x", stdin=os.urandom(300_000))
    served.good("put", "-", "garbage/y", stdin=os.urandom(300_000))
    served.good("rm", "garbage/x")
    reports = [json.loads(served.good("gc", "--json").out) for _ in range(CYCLES)]
    assert sum(report["freed_bytes"] for report in reports) >= 300_000
    assert len(served.good("cat", "garbage/y").out) == 300_000
    assert served.good("fsck", "--full").code == 0


def test_gc_of_a_store_that_nobody_serves_frees_at_once(tmp_path: Path) -> None:
    data = tmp_path / "store"
    for name in ("x", "y"):
        assert lake("put", "--data", data, "-", f"garbage/{name}", stdin=os.urandom(300_000)).code == 0
    assert lake("rm", "--data", data, "garbage/x").code == 0
    report = json.loads(lake("gc", "--data", data, "--json").out)
    assert report["freed_bytes"] >= 300_000


def test_a_full_fsck_finds_a_flipped_bit_and_names_the_object(tmp_path: Path) -> None:
    store = tmp_path / "data"
    content = os.urandom(300_000)
    assert lake("--data", store, "put", "-", "bkt/x", stdin=content).code == 0
    assert lake("--data", store, "put", "-", "bkt/y", stdin=os.urandom(300_000)).code == 0
    assert lake("--data", store, "fsck", "--full").code == 0
    _flip_a_bit(store, content)
    assert lake("--data", store, "fsck").code == 0, "a quick check reads no payload"
    found = lake("--data", store, "fsck", "--full", "--json")
    assert found.code == 1
    report = json.loads(found.out)
    assert report["damage"] >= 1
    assert "bkt/x" in json.dumps(report["findings"])
    assert "bkt/y" not in json.dumps(report["findings"])
    assert {found["code"] for found in report["findings"]} == {"chunk-damaged", "content-chunk-damaged"}
    done = lake("--data", store, "get", "bkt/x", tmp_path / "out")
    assert done.code == 1
    assert "bkt/x" in done.err
    assert not (tmp_path / "out").exists()
    assert lake("--data", store, "get", "bkt/y", tmp_path / "out").code == 0


def _flip_a_bit(store: Path, content: bytes) -> None:
    """Damage the one place where the store keeps the content."""
    for segment in (store / "segments").glob("*.large"):
        stored = bytearray(segment.read_bytes())
        place = stored.find(content[:4096])
        if place >= 0:
            stored[place + 100_000] ^= 1
            segment.write_bytes(stored)
            return
    raise AssertionError("the content is in no segment")


def test_fsck_rebuild_makes_the_index_anew(tmp_path: Path) -> None:
    store = tmp_path / "data"
    assert lake("--data", store, "put", "-", "bkt/x", stdin=b"content").code == 0
    for path in (store / "index").iterdir():
        path.write_bytes(b"")
    done = lake("fsck", "--rebuild", "--full", "--json", "--data", store)
    assert done.code == 0, done
    assert json.loads(done.out)["rebuilt"]["lost_from_sequence"] == 0
    assert lake("--data", store, "cat", "bkt/x").out == b"content"
    assert lake("fsck", "--rebuild").code == 2


def test_fsck_that_cannot_check_exits_with_2(tmp_path: Path) -> None:
    assert lake("fsck", server="unix:/tmp/no-such-lake.sock").code == 2
    assert lake("fsck", "--data", tmp_path / "none").code == 2


def test_the_engine_stops_on_sigterm_and_sigint_and_takes_its_socket_with_it(tmp_path: Path) -> None:
    engine = Served(tmp_path)
    assert engine.stop() == 0
    assert not engine.socket.exists()
    engine.start()
    engine.good("bucket", "create", "stays")
    assert engine.interrupt() == 0
    assert not engine.socket.exists()
    engine.start()
    assert engine.good("ls").lines == ["stays"]
    assert engine.stop() == 0


def test_a_second_engine_of_a_store_is_refused(served: Served, tmp_path: Path) -> None:
    for options in (served.data_options, ["--data", str(served.folders[0])]):
        done = lake("serve", *options, "--socket", tmp_path / "s2", "--admin", "off", "--s3", "off")
        assert done.code == 75
    taken = lake("serve", "--data", tmp_path / "d", "--socket", served.socket, "--admin", "off", "--s3", "off")
    assert taken.code == 71
    assert served.good("ls").code == 0
