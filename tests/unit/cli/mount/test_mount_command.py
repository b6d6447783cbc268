"""`lake mount` on the command line: its options, calls by mount(8), and paths."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cli.main import COMMANDS, run
from cli.mount.engine_wait import until_reached
from cli.mount.fstab import from_mount, from_mount_fuse
from cli.mount.options import parse_mount_options
from cli.mount.places import NAME_CHARACTERS_MAX, escaped_path, places_of
from fuse.kernel import mount_point
from fuse.kernel.mount_point import MountEntry, all_mounts, mount_at
from lakefs.errors import EngineUnreachable, InvalidArgument, PermissionDenied


def test_options_become_the_fields_of_a_mount() -> None:
    texts = ["ro,bucket=models,read_ahead=512", "staging_size=2G,,sync,noatime,noexec"]
    texts += ["attr_timeout=0.5,engine_wait=60"]
    assert parse_mount_options(texts) == {
        "read_only": True,
        "bucket": "models",
        "read_ahead_kib": 512,
        "staging_bytes": 2 << 30,
        "sync": True,
        "attribute_timeout_s": 0.5,
        "engine_wait_s": 60.0,
        "kernel_options": frozenset({"noatime", "noexec"}),
    }


def test_an_installation_without_pyfuse3_says_what_root_has_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    assert run(["mount", str(tmp_path)]) == 74
    assert "as root: apt-get install fuse3 gcc libfuse3-dev pkg-config python3-dev" in capsys.readouterr().err


def test_what_mount_8_hands_to_every_helper_changes_nothing() -> None:
    told = "rw,suid,dev,relatime,_netdev,nofail,noauto,user,user=me,x-systemd.automount,comment=x,defaults"
    assert parse_mount_options([told]) == {}
    # mount(8), "FILESYSTEM-INDEPENDENT MOUNT OPTIONS": whatever asks for what every mount does, or for nothing.
    assert parse_mount_options(["nomand,mand,noiversion,iversion,symfollow,nousers,nogroup,noowner,silent,loud"]) == {}


def test_the_later_of_two_that_contradict_counts() -> None:
    assert parse_mount_options(["ro,rw"]) == {}
    assert parse_mount_options(["rw", "ro"]) == {"read_only": True}
    assert parse_mount_options(["user,noexec,exec"]) == {}


def test_retry_is_in_minutes_and_that_of_an_fstab_line_overrides_the_helper_s() -> None:
    assert parse_mount_options(["retry=2"]) == {"retry_s": 120.0}
    call = from_mount(["lake", "/lake", "-o", "rw,retry=0.5"])
    given = [call[place + 1] for place, word in enumerate(call) if word == "-o"]
    assert parse_mount_options(given) == {"retry_s": 30.0, "source": "lake"}


# --- an engine that starts later --------------------------------------------------------------------------


def test_an_engine_is_waited_for_as_long_as_it_was_said_and_that_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attempts: list[float] = []

    def attempt() -> str:
        attempts.append(time.monotonic())
        if len(attempts) < 4:
            raise EngineUnreachable("nobody serves at unix:/x")
        return "reached"

    assert until_reached(attempt, time.monotonic() + 60) == "reached"
    [line] = capsys.readouterr().err.splitlines()
    assert "waiting for the engine, 60 s at most: nobody serves" in line
    pauses = [later - sooner for sooner, later in pairwise(attempts)]
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)] == [True] * 3


def test_an_engine_that_does_not_start_in_time_is_its_last_error(capsys: pytest.CaptureFixture[str]) -> None:
    def attempt() -> None:
        raise EngineUnreachable("nobody serves at unix:/x")

    start = time.monotonic()
    with pytest.raises(EngineUnreachable, match="nobody serves"):
        until_reached(attempt, start + 0.3)
    assert 0.3 <= time.monotonic() - start < 30
    capsys.readouterr()
    with pytest.raises(EngineUnreachable):
        until_reached(attempt, start)
    assert capsys.readouterr().err == ""


def test_an_engine_that_refuses_is_not_waited_for() -> None:
    def attempt() -> None:
        raise PermissionDenied("wrong token")

    with pytest.raises(PermissionDenied):
        until_reached(attempt, time.monotonic() + 60)


# --- options that make no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alow_other", "'allow_other'"),
        ("max_read=4096", "unknown mount option"),
        ("bucket", "-o bucket=VALUE"),
        ("bucket=", "needs a value"),
        ("remount,ro", "cannot be remounted"),
        ("allow_root", "allow_other"),
        ("read_ahead=1M", "KiB"),
        ("read_ahead=1048577", "KiB"),
        ("read_ahead=²", "KiB"),
        ("staging_size=big", "staging_size: 'big' is not a size"),
        ("attr_timeout=nan", "seconds"),
        ("entry_timeout=-1", "seconds"),
        ("retry=2min", "minutes"),
        ("retry=-1", "minutes"),
        ("retry=nan", "minutes"),
        ("retry=10001", "minutes"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_what_would(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_mount_options([text])
    assert words in caught.value.message
    assert "\n" not in caught.value.message


# --- mount(8) ---------------------------------------------------------------------------------------------


def test_the_helper_s_call_becomes_a_lake_mount() -> None:
    call = ["lake", "/mnt/my models", "-s", "-n", "-v", "-N", "ns", "-t", "lake", "-o", "ro,bucket=models"]
    assert from_mount(call) == [
        *("mount", "--quiet", "-o", "retry=2", "-o", "ro,bucket=models", "-o", "fsname=lake", "--", "/mnt/my models")
    ]


def test_an_address_as_the_source_is_the_engine() -> None:
    made = from_mount(["tcp://store:7000", "/lake", "-o", "rw"])
    assert made[made.index("--server") + 1] == "tcp://store:7000"
    assert "fsname=tcp://store:7000" in made


def test_a_pretended_mount_does_nothing() -> None:
    assert from_mount(["lake", "/lake", "-f"]) == []


@pytest.mark.parametrize("call", [[], ["lake"], ["lake", "/a", "/b"], ["lake", "/a", "-x"], ["s3://b", "/a"]])
def test_a_call_that_makes_no_sense_is_refused(call: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        from_mount(call)


def test_a_call_by_mount_fuse_is_told_from_a_mistyped_verb() -> None:
    assert from_mount_fuse(["none", "/lake", "-o", "ro,dev,suid"]) == [
        *("mount", "--quiet", "-o", "retry=2", "-o", "ro,dev,suid", "-o", "fsname=none", "--", "/lake")
    ]
    assert from_mount_fuse(["", "/lake", "-o", "rw,nodev,nosuid"]) is not None
    assert from_mount_fuse(["moutn", "/lake", "-o", "ro"]) is None
    assert from_mount_fuse(["lake", "/lake"]) is None


def test_the_verbs_are_there() -> None:
    assert {"mount", "unmount"} <= set(COMMANDS)


# --- paths ------------------------------------------------------------------------------------------------


def test_places_are_those_of_the_service_manager_when_it_made_some() -> None:
    places = places_of(Path("/mnt/lake"), {"STATE_DIRECTORY": "/var/lib/other:/var/lib/lake-mount"})
    assert places.staging == Path("/var/lib/lake-mount/mnt-lake/staging")


@pytest.mark.skipif(not shutil.which("systemd-escape"), reason="systemd-escape is not installed")
@pytest.mark.parametrize("path", ["/", "/lake", "/mnt/my-models", "/.hidden/.x", "/a b/ü_1:2.3", "/\\x2d"])
def test_a_path_is_escaped_as_systemd_does(path: str) -> None:
    done = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True)
    assert escaped_path(Path(path)) == done.stdout.rstrip("\n")


@given(st.lists(st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1)))
def test_an_escaped_path_is_one_component_of_a_path(parts: list[str]) -> None:
    escaped = escaped_path(Path("/" + "/".join(parts)))
    assert 0 < len(escaped.encode()) <= NAME_CHARACTERS_MAX
    assert "/" not in escaped
    assert escaped not in (".", "..")


def test_long_paths_that_differ_at_the_end_have_places_of_their_own() -> None:
    one, other = (escaped_path(Path("/" + "long/" * 100 + end)) for end in "ab")
    assert one != other


# --- the table of mounts ----------------------------------------------------------------------------------


def test_the_table_of_mounts_is_read_whatever_the_names_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        b"50 21 0:44 / /mnt/a\\040b\\134\\012\\377 rw shared:1 master:2 - fuse.lake lake\\040x rw,user_id=0\n"
        b"51 50 0:45 / /mnt/a\\040b\\134\\012\\377 rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(mount_point, "MOUNT_TABLE", table)
    place = Path("/mnt/a b\\\n\udcff")
    assert all_mounts()[1] == MountEntry("0:44", place, "fuse.lake", "lake x")
    upper = mount_at(place)
    assert upper is not None
    assert upper.type == "tmpfs"
    assert mount_at(Path("/mnt")) is None
