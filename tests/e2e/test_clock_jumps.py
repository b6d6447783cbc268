"""A machine's date is set, forwards and back, under a real engine: nothing is lost, nothing has to be restarted."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lakefs.client.connect import connect
from tests.crash.small_engine import SmallEngine
from tests.e2e.s3_raw import Signer, signer_of

pytestmark = pytest.mark.slow
DAY_S = 86_400
YEAR_S = 365 * DAY_S
FORBIDDEN = 403


class ShiftedEngine(SmallEngine):
    """An engine whose date can be set."""

    def __init__(self, folder: Path) -> None:
        self._clock = folder / "clock"
        self.off_s = 0
        self.set_date(0)
        super().__init__(folder, started=False)
        self.program = [sys.executable, "-m", "tests.e2e.shifted_lake", str(self._clock)]
        self.start()

    def set_date(self, off_s: int) -> None:
        """Put the clock off by that much, from now on."""
        new = self._clock.with_suffix(".new")
        new.write_text(str(off_s))
        new.rename(self._clock)
        self.off_s = off_s


def use(engine: ShiftedEngine, signer: Signer, stored: dict[str, bytes]) -> None:
    """Check that everything works, through both faces, gc included; a request signed with another date is refused."""
    name = f"bkt/at{engine.off_s}"
    right = replace(signer, offset_s=engine.off_s)
    with connect(engine.server) as client:
        for size in (10, 70_000, 300_000):
            stored[f"{name}-{size}"] = os.urandom(size)
            client.put(f"{name}-{size}", stored[f"{name}-{size}"], create_bucket=True)
        stored[f"{name}-s3"] = os.urandom(5_000)
        assert right.ask("PUT", f"/{name}-s3", stored[f"{name}-s3"]).status == 200
        client.remove(f"{name}-10")
        del stored[f"{name}-10"]
        client.gc(compact=True)
        assert client.scrub(for_s=5.0, rate_bytes_per_s=0)["quarantined_chunks"] == 0
        for name, content in stored.items():
            assert client.get(name) == content
            assert right.ask("GET", f"/{name}").body == content
        assert client.status()["state"] == "serving"
        assert client.fsck(full=True)["damage"] == 0
    wrong = replace(signer, offset_s=engine.off_s + 3600).ask("GET", "/b")
    assert (wrong.status, wrong.code) == (FORBIDDEN, "RequestTimeTooSkewed")


def test_a_date_that_is_set_forwards_and_back_takes_nothing_along(tmp_path: Path) -> None:
    stored = {"bkt/before": os.urandom(300_000)}
    with TemporaryDirectory(prefix="lake-") as folder:
        engine = ShiftedEngine(Path(folder))
        signer = signer_of(engine)
        with connect(engine.server) as client:
            client.put("bkt/before", stored["bkt/before"], create_bucket=True)
            upload = client.create_upload("bkt/parts")
            parts = [client.put_part(upload, 1, bytes(100_000))]
            with client.open("bkt/before") as reader:
                first = reader.read(100_000)
                for number, off_s in enumerate((DAY_S, -YEAR_S, 5 * DAY_S, 0), 2):
                    engine.set_date(off_s)
                    use(engine, signer, stored)
                    parts.append(client.put_part(upload, number, bytes(70_000)))
                assert first + reader.read() == stored["bkt/before"]
            client.complete_upload(upload, [(part.number, part.etag) for part in parts])
            stored["bkt/parts"] = bytes(100_000 + 4 * 70_000)
            use(engine, signer, stored)
        engine.set_date(-YEAR_S)
        engine.kill()
        engine.start()
        signer = signer_of(engine)
        use(engine, replace(signer, offset_s=0), stored)
        assert engine.stop() == 0
