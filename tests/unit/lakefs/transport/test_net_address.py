"""Addresses of engines, as text and as values."""

from __future__ import annotations

import pytest

from lakefs.errors import InvalidArgument
from lakefs.transport.address import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/lake.sock", UnixAddress("/run/lake.sock")),
        ("unix:lake.sock", UnixAddress("lake.sock")),
        ("tcp://host:9100", TcpAddress("host", 9100)),
        ("tcp://[::1]:0", TcpAddress("::1", 0)),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:a\0b",
        f"unix:/{'x' * 107}",
        "tcp://",
        "tcp://host",
        "tcp://host:",
        "tcp://:1",
        "tcp://host:65536",
        "tcp://host:-1",
        "tcp://host:\u0661",
        "tcp://::1:9100",
        "http://host:1",
        "/run/lake.sock",
    ],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)
