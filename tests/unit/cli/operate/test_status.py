"""`lake status` for people: the lines about S3 gateways."""

from __future__ import annotations

from typing import Any

from cli.operate.status import _gateway_lines

URL = "http://127.0.0.1:9000"


def gateway(answers: int, repeated: int, passed_on: dict[str, int], **others: object) -> dict[str, Any]:
    """Return a gateway as an engine lists it: one with a door, at the engine's Unix socket."""
    counts = {"answers": answers, "repeated": repeated, "passed_on": passed_on}
    return {"peer": "uid 0 pid 7", "url": URL, "process": 7, "door": True, **counts, **others}


def test_a_gateway_has_a_line_of_counts_and_one_of_reasons_most_frequent_first() -> None:
    assert _gateway_lines([gateway(20, 12, {"head": 1, "new": 5, "keys": 0, "changed": 2})]) == [
        "s3 http://127.0.0.1:9000             12 of 20 answers given by the door",
        "  left to Python, by reason          new 5, changed 2, head 1",
    ]


def test_a_gateway_that_has_served_nothing_has_no_reasons() -> None:
    assert _gateway_lines([gateway(0, 0, {"new": 0})]) == [
        "s3 http://127.0.0.1:9000             0 of 0 answers given by the door"
    ]


def test_processes_behind_one_address_are_added_up() -> None:
    found = _gateway_lines([gateway(20, 12, {"new": 5}), gateway(10, 3, {"new": 1, "content": 6})])
    assert [line[37:] for line in found] == ["15 of 30 answers given by the door (2 processes)", "new 6, content 6"]


def test_addresses_and_machines_are_told_apart() -> None:
    found = _gateway_lines(
        [
            gateway(1, 0, {}, url="https://0.0.0.0:9000", peer="10.0.0.7:5001", door=False),
            gateway(2, 0, {}, url="https://0.0.0.0:9000", peer="10.0.0.8:5002", door=False),
            gateway(3, 1, {}, url="https://0.0.0.0:9000", peer="embedded"),
        ]
    )
    assert found == [
        "s3 https://0.0.0.0:9000 at 10.0.0.7  1 answers, none repeated: no door",
        "s3 https://0.0.0.0:9000 at 10.0.0.8  2 answers, none repeated: no door",
        "s3 https://0.0.0.0:9000              1 of 3 answers given by the door",
    ]


def test_an_engine_without_gateways_has_no_such_lines() -> None:
    assert _gateway_lines([]) == []
