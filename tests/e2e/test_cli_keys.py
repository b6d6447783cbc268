"""`lake key`: access keys are made, listed without their secrets, revoked, and outlive the engine."""

from __future__ import annotations

import json
from pathlib import Path

import lakefs
from tests.e2e.served import Served, serving


def test_access_keys_are_made_listed_and_revoked(served: Served) -> None:
    made = json.loads(
        served.good("key", "create", "--bucket", "models", "--bucket", "data", "--read-only", "--json").out
    )
    assert (len(made["access_key"]), len(made["secret_key"])) == (20, 40)
    assert (made["buckets"], made["read_only"]) == (["models", "data"], True)
    plain = served.good("key", "create").lines
    assert [line.rsplit(maxsplit=1)[0] for line in plain] == ["access key", "secret key"]
    other = plain[0].split()[-1]

    listed = served.good("key", "ls")
    assert made["secret_key"] not in listed.text
    assert {line.split()[0] for line in listed.lines} == {made["access_key"], other}
    as_json = served.good("key", "ls", "--json")
    assert made["secret_key"] not in as_json.text
    limits = {found["access_key"]: found["buckets"] for found in json.loads(as_json.out)["keys"]}
    assert limits == {made["access_key"]: ["models", "data"], other: []}

    served.good("key", "rm", made["access_key"])
    gone = served("key", "rm", made["access_key"])
    assert (gone.code, "lake key ls" in gone.err) == (66, True)
    assert [line.split()[0] for line in served.good("key", "ls").lines] == [other]


def test_an_access_key_outlives_an_engine_that_is_killed(folder: Path) -> None:
    with serving(folder) as engine:
        made = json.loads(engine.good("key", "create", "--json").out)
        engine.kill()
        engine.start()
        with lakefs.connect(engine.server) as client:
            found = client.find_access_key(made["access_key"])
            assert client.find_access_key("A" * 20) is None
        assert found is not None
        assert found.secret_key == made["secret_key"]


def test_a_key_for_a_bucket_that_cannot_be_is_refused(served: Served) -> None:
    assert served("key", "create", "--bucket", "no bucket").code == 2
