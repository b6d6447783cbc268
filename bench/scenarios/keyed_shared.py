"""One prompt seen by two vLLM engines: the bytes that the lake stores of it, and the blocks that the second writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import lakefs
from bench.harness.measure import Bench, Scenario, at_most
from bench.harness.process import EngineProcess
from bench.harness.sampled import ALONE, OURS, Entrant, Run, Sampled, Side, Target
from bench.peers.kv_clients import Spec
from bench.peers.kv_contest import KvWorker
from bench.peers.kv_worker import Order
from bench.scenarios.keyed import PLUGINS
from bench.scenarios.pool import KIB

PROMPT_BLOCKS: Final = 64
BATCH: Final = 16
STORED: Final = "stored bytes / bytes of the prompt"
AGAIN: Final = "blocks that the second engine wrote"


@contextmanager
def sides(bench: Bench) -> Iterator[Sequence[Entrant]]:
    """Context manager: an engine, and two processes with a tier of vLLM each, of one model.  CouldNotRun."""
    with ExitStack() as stack:
        engine = stack.enter_context(EngineProcess(bench.folder))
        lake = stack.enter_context(engine.connect())
        workers: list[KvWorker] = []
        for name in ("first", "second"):
            folder = bench.folder / name
            folder.mkdir()
            spec = Spec("vllm-lake", engine.address, 64 * KIB, PROMPT_BLOCKS, "one-model")
            workers.append(KvWorker(folder, spec, PLUGINS))
            stack.callback(workers[-1].end)
        yield [Entrant(OURS, partial(_side, engine, lake, *workers))]


@contextmanager
def _side(engine: EngineProcess, lake: lakefs.Lake, first: KvWorker, second: KvWorker) -> Iterator[Side]:
    prompts = itertools.count(1)

    def run() -> Run:
        key = next(prompts) * PROMPT_BLOCKS
        before = _stored(lake)
        first.do(Order("fill", key, PROMPT_BLOCKS, BATCH))
        between = _stored(lake)
        second.do(Order("fill", key, PROMPT_BLOCKS, BATCH))
        after = _stored(lake)
        second.do(Order("check", key, PROMPT_BLOCKS, BATCH))
        size = PROMPT_BLOCKS * 64 * KIB
        more = {STORED: (after[1] - before[1]) / size, AGAIN: float(after[0] - between[0])}
        return Run(2 * PROMPT_BLOCKS // BATCH, 3 * size, more=more)

    yield Side(run, servers=lambda: [engine.pid])


def _stored(lake: lakefs.Lake) -> tuple[int, int]:
    """Return the values that were stored, and the bytes of all that are."""
    counts = lake.status()["keyed"]
    return int(counts["stored"]), int(counts["value_bytes"])


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Sampled(
        "keyed-shared",
        "one prompt in two vLLM engines",
        STORED,
        sides,
        generator=ALONE,
        expected_s=40,
        targets=(Target(STORED, at_most(1)), Target(AGAIN, at_most(0))),
    ),
)
