"""Configuration: precedence, defaults, and errors that say where and what."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lakefs.config import settings as config
from lakefs.config.settings import Address, default_data_folder, default_socket, load, parse_address, parse_size
from lakefs.errors import ConfigError, InvalidArgument


@pytest.fixture
def no_system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the machine's own configuration from the tests."""
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "absent.toml")


def _file(folder: Path, text: str) -> Path:
    path = folder / "lake.toml"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("no_system_file")
def test_nothing_given_gives_the_documented_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert load(environ={}).as_text() == {
        "data": "/var/lib/lake",
        "socket": "/run/lake/lake.sock",
        "socket_group": "",
        "native": "off",
        "s3": "127.0.0.1:9000",
        "s3_region": "us-east-1",
        "s3_domains": "",
        "s3_signature_v2": "off",
        "s3_accept_sse": "off",
        "s3_tls_cert": "",
        "s3_tls_key": "",
        "s3_access_log": "off",
        "s3_access_log_sample": "1/1",
        "s3_door": "on",
        "s3_door_memory": "67108864",
        "admin": "127.0.0.1:9001",
        "log_level": "info",
        "strict_permissions": "off",
        "upload_expiry": "7d",
        "names_checkpoint_interval": "1h",
        "scrub_interval": "14d",
        "scrub_rate": "67108864",
        "io_uring": "auto",
        "hot_index": "auto",
        "hot_index_entries": "0",
        "dram_tier_bytes": "auto",
        "rdma": "auto",
        "timeout": "30",
        "heads": "1",
        "protect": "4+2",
    }


def test_a_user_s_defaults_lie_in_the_user_s_folders() -> None:
    home = {"HOME": "/home/ada"}
    assert default_data_folder(home, uid=7) == Path("/home/ada/.local/share/lake")
    assert default_data_folder({**home, "XDG_DATA_HOME": "/big"}, uid=7) == Path("/big/lake")
    assert default_data_folder({**home, "XDG_DATA_HOME": "relative"}, uid=7) == Path("/home/ada/.local/share/lake")
    data = Path("/big/lake")
    assert default_socket(data, {"XDG_RUNTIME_DIR": "/run/user/7"}, uid=7) == Path("/run/user/7/lake.sock")
    assert default_socket(data, {}, uid=7) == Path("/big/lake/lake.sock")


def test_the_service_s_defaults_are_the_folders_of_its_unit() -> None:
    given_by_unit = {"STATE_DIRECTORY": "/var/lib/lake", "RUNTIME_DIRECTORY": "/run/other:/run/lake"}
    assert default_data_folder(given_by_unit, uid=7) == Path("/var/lib/lake")
    assert default_socket(Path("/x"), given_by_unit, uid=7) == Path("/run/lake/lake.sock")
    elsewhere = {"STATE_DIRECTORY": "/var/lib/backup", "RUNTIME_DIRECTORY": "lake", "HOME": "/home/ada"}
    assert default_data_folder(elsewhere, uid=7) == Path("/home/ada/.local/share/lake")
    assert default_socket(Path("/x"), elsewhere, uid=7) == Path("/x/lake.sock")


def test_variables_override_the_file_and_flags_override_both(tmp_path: Path) -> None:
    path = _file(tmp_path, 'data = "/from/file"\nadmin = "127.0.0.1:1"\nlog_level = "debug"\n')
    loaded = load(
        file=path, environ={"LAKE_ADMIN": "127.0.0.1:2", "LAKE_DATA": "/from/env"}, flags={"data": "/from/flag"}
    )
    assert loaded.data == Path("/from/flag")
    assert loaded.admin == Address("127.0.0.1", 2)
    assert loaded.log_level == "debug"
    assert loaded.origins["data"] == "--data"
    assert loaded.origins["admin"] == "LAKE_ADMIN"
    assert loaded.origins["log_level"] == str(path)
    assert loaded.origins["native"] == "default"


def test_a_flag_that_was_not_given_and_an_empty_variable_override_nothing(tmp_path: Path) -> None:
    path = _file(tmp_path, 'data = "/from/file"\n')
    assert load(file=path, environ={"LAKE_DATA": ""}, flags={"data": None}).data == Path("/from/file")


def test_the_file_named_by_the_variable_is_read(tmp_path: Path) -> None:
    path = _file(tmp_path, 'native = "[::1]:7000"\n')
    assert load(environ={"LAKE_CONFIG": str(path)}).native == Address("::1", 7000)


def test_what_the_text_form_says_loads_to_the_same_configuration(tmp_path: Path) -> None:
    first = load(
        file=_file(tmp_path, f'data = "{tmp_path}"\nsocket = "unix:{tmp_path}/s"\nnative = "[::]:0"\nadmin = "off"\n'),
        environ={},
    )
    assert first.socket == tmp_path / "s"
    assert first.admin is None
    text = "".join(f'{name} = "{value}"\n' for name, value in first.as_text().items())
    assert load(file=_file(tmp_path, text), environ={}) == first


def test_an_unknown_key_names_the_nearest_known_one_and_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, 'sokcet = "/s"\n')
    with pytest.raises(ConfigError) as caught:
        load(file=path, environ={})
    assert str(path) in caught.value.message
    assert "'sokcet'" in caught.value.message
    assert "nearest known one is 'socket'" in caught.value.message


def test_an_unknown_flag_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="'admin'"):
        load(environ={}, flags={"adminn": "x"})


@pytest.mark.usefixtures("no_system_file")
def test_a_slip_in_a_variable_is_told_and_a_platform_s_own_variable_is_passed_over() -> None:
    with pytest.raises(ConfigError, match="did you mean LAKE_SOCKET"):
        load(environ={"LAKE_SOKET": "/s"})
    with pytest.raises(ConfigError, match="did you mean LAKE_DATA"):
        load(environ={"LAKE_DATAA": "/s"})
    platform = {"LAKE_PORT_9001_TCP_ADDR": "10.0.0.1", "LAKE_SERVICE_HOST": "10.0.0.1", "LAKE_PORT": "tcp://1:2"}
    assert load(environ=platform) == load(environ={})


@pytest.mark.usefixtures("no_system_file")
def test_a_variable_in_other_case_is_taken_for_a_slip() -> None:
    with pytest.raises(ConfigError, match="did you mean LAKE_ADMIN"):
        load(environ={"LAKE_Admin": "off"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data = 5\n", "data must be text in quotes, not int"),
        ("native = false\n", "native must be text in quotes, not bool"),
        ('admin = "9001"\n', "'9001' is not an address"),
        ('s3_access_log_sample = "0.1"\n', "'0.1' is no share"),
        ('s3_access_log_sample = "1/0"\n', "'1/0' is no share"),
        ('s3_region = "US East"\n', "'US East' is no region"),
        ('s3_domains = "s3.local,a..b"\n', "'a..b' is no host name"),
        (f's3_domains = "{",".join(f"s{number}.local" for number in range(17))}"\n', "17 domains; 16 are allowed"),
        ('admin = "127.0.0.1:65536"\n', "port must be a number from 0 to 65535"),
        ('log_level = "loud"\n', "debug, info, warning, error"),
        ('strict_permissions = "yes"\n', "neither on nor off"),
        ('s3_accept_sse = "aws:kms"\n', "neither AES256 nor off"),
        ('socket_group = "a b"\n', "not the name of a group"),
        ('data = ""\n', "not a path"),
        ('data = "x\\u0000y"\n', "not a path"),
        ("data = \n", "not valid TOML"),
        ('data = "a"\ndata = "b"\n', "not valid TOML"),
        ("[engine]\ndata = 1\n", "unknown key 'engine'"),
        ("x = " + "[" * 5000 + "\n", "not valid TOML"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_the_file_s_name(tmp_path: Path, text: str, words: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file=path, environ={})
    assert words in caught.value.message
    assert caught.value.message.startswith(str(path))


@pytest.mark.usefixtures("no_system_file")
def test_a_bad_variable_or_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^LAKE_NATIVE: "):
        load(environ={"LAKE_NATIVE": "everywhere"})
    with pytest.raises(ConfigError, match=r"^--log-level: "):
        load(environ={}, flags={"log_level": "loud"})


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="107 bytes"):
        load(environ={}, flags={"socket": "/" + "s" * 107})
    assert load(environ={}, flags={"socket": "/" + "s" * 106}).socket == Path("/" + "s" * 106)


def test_a_default_socket_in_too_deep_a_data_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    with pytest.raises(ConfigError, match="set `socket` to a shorter one"):
        load(environ={}, flags={"data": "/" + "d" * 107})


def test_a_named_file_must_exist_be_readable_and_be_small(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(file=tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path, environ={})
    with pytest.raises(ConfigError, match="not a configuration"):
        load(file=_file(tmp_path, "#" * (config.FILE_BYTES_MAX + 1)), environ={})
    (tmp_path / "latin.toml").write_bytes(b'data = "\xff"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(file=tmp_path / "latin.toml", environ={})


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:9001", "127.0.0.1", 9001), ("[::1]:0", "::1", 0), ("tcp://lake.example:65535", "lake.example", 65535)],
)
def test_an_address_is_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert parse_address(str(parse_address(text))) == Address(host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        ":1",
        "h:",
        "h:-1",
        "h:+1",
        "h:1_0",
        "h:99999999999",
        "::1:5",
        "[h]:1",
        "a b:1",
        "h/x:1",
        "h:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096 B", 4096),
        ("64K", 65536),
        ("512mib", 512 << 20),
        ("2 GB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("0.25k", 256),
        ("3T", 3 << 40),
        ("1P", 1 << 50),
    ],
)
def test_a_size_is_a_number_with_a_unit_of_powers_of_1024(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "K",
        "-1",
        "1.5",
        "1.5B",
        "1 2K",
        "1e3",
        "0x10",
        "1Ki B",
        "1X",
        "1iB",
        ".5K",
        "1.K",
        "9" * 30,
        "\N{ARABIC-INDIC DIGIT THREE}K",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_size(text)


@given(st.text(max_size=40))
def test_any_text_is_an_address_and_a_size_or_refused_as_one(text: str) -> None:
    for parse in (parse_address, parse_size):
        with contextlib.suppress(InvalidArgument):
            parse(text)


def test_importing_the_configuration_loads_neither_trio_nor_the_parser_of_files() -> None:
    probe = "import sys, lakefs.config.settings; print(*{'trio', 'tomllib', 'difflib', 'msgspec'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90s", 90), ("30m", 1800), ("12 h", 43_200), ("7d", 604_800), ("0d", 0)]
)
def test_a_time_is_a_number_and_a_unit(text: str, seconds: int) -> None:
    assert config.parse_duration(text) == seconds
    assert config.parse_duration(config.duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "7", "-1d", "1w", "1.5d", "d", "7d7d", "1e3s", "9999999999s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a time"):
        config.parse_duration(text)


def test_domains_are_lower_case_and_the_longest_comes_first() -> None:
    given_domains = {"s3_domains": " S3.local, *.x.s3.local. ,s3.local,"}
    assert load(environ={}, flags=given_domains).s3_domains == ("x.s3.local", "s3.local")


def test_a_lake_on_several_devices_has_a_list_of_folders(tmp_path: Path) -> None:
    listed = _file(tmp_path, 'data = ["/disk/1", "/disk/2"]\nprotect = "2+1"\n')
    found = load(file=listed, environ={})
    assert (found.data, found.devices) == (Path("/disk/1"), (Path("/disk/1"), Path("/disk/2")))
    assert found.protect == "2+1"
    shown = found.as_text()
    assert shown["data"] == '["/disk/1", "/disk/2"]'
    assert load(environ={"LAKE_DATA": shown["data"]}).devices == found.devices
    assert load(flags={"data": ("/disk/1", "/disk/2")}, environ={}).devices == found.devices
    assert load(flags={"data": ()}, file=listed, environ={}).devices == found.devices


def test_one_folder_is_one_engine_s(tmp_path: Path) -> None:
    for found in (
        load(flags={"data": ("/disk/1",)}, environ={}),
        load(file=_file(tmp_path, 'data = ["/disk/1"]\n'), environ={}),
        load(environ={"LAKE_DATA": "/disk/1"}),
    ):
        assert (found.data, found.devices, found.as_text()["data"]) == (Path("/disk/1"), (), "/disk/1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('data = ["/disk/1", "/disk/1"]', "/disk/1 is given twice"),
        ("data = []", "names at least one"),
        ("data = [1]", "must be text in quotes"),
        ('data = ["/disk/1", ""]', "is not a path"),
        ('heads = "0"', "a lake's machine has 1 to 64 heads, not 0"),
        ('protect = "three"', "is no protection; give data and parity shards, as 4+2"),
    ],
)
def test_a_list_of_folders_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(file=_file(tmp_path, text), environ={})


@pytest.mark.usefixtures("no_system_file")
@pytest.mark.parametrize(("text", "expected"), [("true", True), ("false", False), ('"on"', True), ('"off"', False)])
def test_a_switch_in_a_file_may_be_true_or_false(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(f"s3_signature_v2 = {text}\n")
    assert load(file=file, environ={}).s3_signature_v2 is expected
