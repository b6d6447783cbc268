"""Memory of the engine with its S3 face: 4,000 connections that wait for their next request; and 1,000 open
connections, on 50 of which uploads of 5 GiB in parts are in progress.

An upload of 5 GiB is simulated by its memory: the records of 640 parts (8 MiB each in truth, 4 KiB here), then parts
of 16 MiB that stream in on all 50 connections at once, two after one another on each, 1.6 GiB in all.  No upload is
completed.  The figure is the peak of the resident set (VmHWM) from the first connection on.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.harness.accounting import memory_of
from bench.harness.content import window
from bench.harness.measure import Bench, Figure, Scenario, Single, at_most
from bench.harness.s3_load import Load, allow_descriptors
from bench.harness.s3_requests import BUCKET, UNSIGNED, Request, Signer
from bench.peers.s3_sides import Server, ours
from bench.scenarios.s3_crowd import SMALL, idle

PARKED: Final = 4000
WARM: Final = 200
PARKED_LIMIT: Final = 512.0
CONNECTIONS: Final = 1000
UPLOADS: Final = 50
SMALL_PARTS: Final = 640
PART: Final = 16 << 20
PARTS_EACH: Final = 2
LIMIT: Final = float(512 << 20)
_UPLOAD_ID: Final = re.compile(rb"<UploadId>([^<]+)</UploadId>")


def measure(bench: Bench) -> dict[str, float]:
    """Return the peak, and the rate of the streamed parts."""
    uploads = bench.scale.pick(UPLOADS, 3)
    connections = bench.scale.pick(CONNECTIONS, 30)
    small_parts, part = bench.scale.pick(SMALL_PARTS, 4), bench.scale.pick(PART, 1 << 20)
    allow_descriptors(2 * connections)
    with ours(bench.folder / "ours") as server, ExitStack() as stack:
        server.put("hot/0", bytes(window(SMALL)))
        before = server.resident_bytes()
        forget_peak(server.pid)
        stack.enter_context(idle(server, connections - uploads))
        load = stack.enter_context(Load(server.endpoint, uploads))
        ids = [start_upload(server, number) for number in range(uploads)]
        with_connections = server.resident_bytes()
        load.run(
            part_of(Signer(server.endpoint), upload, ids[upload], number, SMALL)
            for number in range(1, small_parts + 1)
            for upload in range(uploads)
        )
        with_parts = server.resident_bytes()
        signer = Signer(server.endpoint)
        outcome = load.run(
            part_of(signer, upload, ids[upload], small_parts + 1 + number, part)
            for number in range(PARTS_EACH)
            for upload in range(uploads)
        )
        return {
            "peak resident": float(peak_bytes(server.pid)),
            "at the start": float(before),
            "with the connections": float(with_connections),
            "with the parts' records": float(with_parts),
            "streamed B/s": outcome.rate,
        }


def measure_parked(bench: Bench) -> dict[str, float]:
    """Return the anonymous memory that each connection takes that was answered once and waits."""
    connections = bench.scale.pick(PARKED, WARM)
    allow_descriptors(2 * connections)  # the server inherits it
    with ours(bench.folder / "ours") as server:
        server.put("hot/0", bytes(window(SMALL)))
        with idle(server, WARM):
            pass
        before = memory_of([server.pid]).private_bytes
        with idle(server, connections):
            after = memory_of([server.pid]).private_bytes
    return {"a connection": (after - before) / connections, "at the start": float(before), "with all": float(after)}


def start_upload(server: Server, number: int) -> str:
    """Send CreateMultipartUpload; return the upload's id."""
    request = Signer(server.endpoint).request("POST", f"/{BUCKET}/upload/{number}", query="uploads=")
    found = _UPLOAD_ID.search(server.must(request))
    assert found is not None
    return found[1].decode()


def part_of(signer: Signer, upload: int, upload_id: str, number: int, size: int) -> Request:
    """Return an UploadPart request."""
    query = f"partNumber={number}&uploadId={upload_id}"
    return signer.request("PUT", f"/{BUCKET}/upload/{upload}", query=query, body=window(size), payload_hash=UNSIGNED)


def forget_peak(pid: int) -> None:
    """Reset the peak of resident memory (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Return VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("a process has a peak")


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Single(
        "s3-parked",
        "S3 with 4,000 connections that were answered once and wait: RssAnon for each",
        (Figure("a connection", at_most(PARKED_LIMIT), "B"),),
        measure_parked,
    ),
    Single(
        "s3-memory",
        "S3 with 1,000 connections and 50 uploads in parts under way",
        (Figure("peak resident", at_most(LIMIT), "B"),),
        measure,
    ),
)
