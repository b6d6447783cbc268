"""vLLM's secondary tier: blocks of its KV cache, kept in a space of the lake.

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "LakeTier", "module_path": "lakefs.plugins.kv.vllm_tier",
                             "server": "unix:/run/lake/lake.sock", "quota": "200G"}]}

A key is vLLM's OffloadKey: a hash of the tokens up to the block, and the group's index.  The space is named after
everything else that a block's bytes depend on: model, dtype, layout of the workers, groups and rank.  So engines that
would compute the same blocks share them, and others never meet.

Rules kept here:
- No method waits, except `drain_jobs` and `shutdown`.  Blocks move on the movers' two threads; look-ups are answered by
  vLLM's own look-up thread, by one request for all keys of a step.
- A block that cannot be read is a miss: vLLM computes it.
- Where vLLM keeps its blocks in one shared file, the engine on this machine is lent that, and moves blocks itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, ClassVar, Final

from lakefs.content.verify import check_named
from lakefs.plugins.kv.versions import check_host

PACKAGE: Final = "vllm"
KNOWN_FROM: Final = (0, 33, 0)
KNOWN_BELOW: Final = (0, 34, 0)
check_host(PACKAGE, KNOWN_FROM, KNOWN_BELOW)  # before the imports below, whose names are those of these versions

from vllm.logger import init_logger  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext  # noqa: E402
from vllm.v1.kv_offload.file_mapper import FileMapper  # noqa: E402
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

from lakefs.plugins.kv.block_moves import BlockMoves, Ended  # noqa: E402
from lakefs.plugins.kv.movers import Connection, Movers, SpaceSettings  # noqa: E402
from lakefs.plugins.kv.vllm_region import lendable_descriptor  # noqa: E402

logger = init_logger(f"vllm.{__name__}")
DEPTH_TOKENS: Final = 16
"""Tokens of one step of depth: a chain of 1,048,560 tokens has different depths all along."""
_DEPTH_MAX: Final = 65_535


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's look-up thread, answered by `match`."""

    def __init__(self, connection: Connection, tier_type: str) -> None:
        self._connection = connection
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Return which keys are present.  An error is logged by vLLM, and all keys are absent."""
        return self._connection.use(lambda space: space.match([bytes(key) for key in keys])).present


class LakeTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier that vLLM makes from an entry of `secondary_tiers`.

    Its options: `server` (default LAKE_SERVER), `space` (the beginning of the space's name), `quota`, `ttl` and
    `check` ("crc32c", "blake3").  Making it connects to the engine; errors are those of `lakefs.connect`.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        server: str | None = None,
        space: str = "vllm",
        quota: str | int | None = None,
        ttl: str | float | None = None,
        check: str = "crc32c",
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.space_name = f"{space}/{space_of(offloading_spec)}"
        settings = SpaceSettings(server, self.space_name, quota, ttl, check_named(check))
        self._connection = Connection(settings)
        self._movers = Movers("lake-vllm", lambda: Connection(settings))
        descriptor = lendable_descriptor(offloading_spec, primary_kv_view) if self._connection.is_local else None
        self._moves = BlockMoves(self._movers, primary_kv_view, self._block_size_bytes, descriptor)
        logger.info("Blocks for the lake are %s", "moved by its engine" if self._moves.is_lent else "copied")
        self._lookups = _Lookups(self._connection, tier_type)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> Any:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        positions = [job_metadata.req_context.get_offload_key_position(key) or 0 for key in keys]
        depths = [min(_DEPTH_MAX, position // DEPTH_TOKENS) for position in positions]
        self._moves.store(job_metadata.job_id, [bytes(key) for key in keys], _rows(job_metadata), depths)

    def submit_load(self, job_metadata: Any) -> None:
        self._moves.load(job_metadata.job_id, [bytes(key) for key in job_metadata.keys], _rows(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        return [self._result_of(ended) for ended in self._moves.collect()]

    def _result_of(self, ended: Ended) -> Any:
        if ended.reason:
            logger.warning(
                "The lake moved %d blocks, and %d not: %s", len(ended.moved), len(ended.failed), ended.reason
            )
        if ended.is_load and ended.failed:
            self._lookups.mark_miss(ended.failed)
        partly = tuple(ended.moved) if ended.is_load and ended.failed and ended.moved else None
        return JobResult(
            job_id=ended.number,
            success=not ended.failed,
            successful_keys=partly,
            transfer_time=ended.seconds,
            transfer_bytes=ended.moved_bytes,
        )

    def has_pending_work(self) -> bool:
        return self._moves.is_busy

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        self._movers.wait_idle()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._movers.close()
        self._moves.close()
        self._connection.close()


def space_of(offloading_spec: Any) -> str:
    """Return the part of a space's name that stands for all that a block's bytes depend on beside its key.

    It is made from the fields by which vLLM's own `fs` tier tells its folders apart.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=offloading_spec,
        blocks_per_file=offloading_spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    fields = json.dumps(mapper.fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(fields.encode()).hexdigest()[:16]
    model = str(mapper.fields["model_name"]).replace("/", "_")
    readable = "".join(letter if letter.isascii() and letter.isprintable() else "_" for letter in model)[:80]
    return f"{readable}-{digest}-r{mapper.rank}"


def _rows(job_metadata: Any) -> list[int]:
    return [int(chunk) for chunk in job_metadata.chunk_ids]
