"""vLLM's secondary tier: blocks of its KV cache, kept in a space of the lake.

    "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "LakeTier", "module_path": "lakefs.plugins.kv.vllm_tier",
                             "server": "unix:/run/lake/lake.sock", "quota": "200G"}]}

A key is vLLM's OffloadKey: a hash of the tokens up to the block, and the group's index.  The space is named after
everything else that a block's bytes depend on (`lakefs.plugins.kv.vllm_space`): the model's content, dtype, layout of
the workers, groups, rank.  So engines that would compute the same blocks share them, and others never meet.

Rules kept here:
- No method waits, except `drain_jobs` and `shutdown`.  Blocks move on the movers' two threads; look-ups are answered by
  vLLM's own look-up thread, by one request for all keys of a step.
- A block that cannot be read is a miss: vLLM computes it.
- Where vLLM keeps its blocks in one shared file, the engine on this machine is lent that, and moves blocks itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from lakefs.content.verify import check_named
from lakefs.plugins.kv.offers import check_host
from lakefs.plugins.kv.vllm_host import OFFERS, PACKAGE

RELEASE: Final = check_host(PACKAGE, OFFERS)  # before the imports below, whose names are among these

from vllm.logger import init_logger  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext  # noqa: E402
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

from lakefs.plugins.kv.block_moves import BlockMoves, Ended  # noqa: E402
from lakefs.plugins.kv.model_files import model_of  # noqa: E402
from lakefs.plugins.kv.movers import Connection, Movers, SpaceSettings  # noqa: E402
from lakefs.plugins.kv.vllm_region import lendable_descriptor  # noqa: E402
from lakefs.plugins.kv.vllm_space import space_of, unseen_by  # noqa: E402

logger = init_logger(f"vllm.{__name__}")
DEPTH_TOKENS: Final = 16
"""Tokens of one step of depth: a chain of 1,048,560 tokens has different depths all along."""
_DEPTH_MAX: Final = 65_535


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's look-up thread, answered by `match`."""

    def __init__(self, connection: Connection, row_bytes: int, tier_type: str) -> None:
        self._connection = connection
        self._row_bytes = row_bytes
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Return which keys have a block of vLLM's length.  An error is logged by vLLM, and all keys are absent."""
        wanted, sizes = [bytes(key) for key in keys], [self._row_bytes] * len(keys)
        return self._connection.use(lambda space: space.match(wanted, sizes)).present


class LakeTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier that vLLM makes from an entry of `secondary_tiers`.

    Its options: `server` (default LAKE_SERVER), `space` (the beginning of the space's name), `quota`, `ttl`, `check`
    ("crc32c", "blake3") and `salt` (text that stands for what vLLM does not tell a tier).  Making it reads samples of a
    local model's files, and connects to the engine; errors are those of `lakefs.connect`.
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
        salt: str | int = "",
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config, row_bytes = offloading_spec.config, _row_bytes(primary_kv_view)
        model = model_of(config.model.name)
        platform = str(current_platform.device_name)
        self.space_name = f"{space}/{space_of(config, model, row_bytes, RELEASE, platform, str(salt))}"
        if salt == "":
            logger.warning("%s", unseen_by(model, config.model.name))
        settings = SpaceSettings(server, self.space_name, quota, ttl, check_named(check))
        self._connection = Connection(settings)
        self._movers = Movers("lake-vllm", lambda: Connection(settings))
        descriptor = lendable_descriptor(offloading_spec, primary_kv_view) if self._connection.is_local else None
        self._moves = BlockMoves(self._movers, primary_kv_view, row_bytes, descriptor)
        logger.info("Blocks for the lake are %s", "moved by its engine" if self._moves.is_lent else "copied")
        self._lookups = _Lookups(self._connection, row_bytes, tier_type)

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


def _row_bytes(rows: memoryview) -> int:
    """Return the bytes of a block: of a row of vLLM's memory."""
    assert rows.strides is not None, "the memory has rows"
    return int(rows.strides[0])


def _rows(job_metadata: Any) -> list[int]:
    return [int(chunk) for chunk in job_metadata.chunk_ids]
