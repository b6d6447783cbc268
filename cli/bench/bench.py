"""`lake bench`: measures how fast this machine serves, in half a minute, on a temporary engine or a given one.

The result is written to stdout: a table with pictures, or one JSON document.  Progress is written to stderr, a bar on a
terminal, a line for each trial elsewhere, nothing with --json.  However the command ends, except by SIGKILL, the
engine and the objects that it made are removed.
"""

from __future__ import annotations

import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import human_bytes, json_option, notice, write_json
from cli.terminal.target import Target, engine_options, pass_target

if TYPE_CHECKING:
    from types import FrameType

    from cli.bench.load import Ground, Outcome, Trial
    from lakefs.histogram import Histogram

SECONDS_MAX = 60.0
PICTURE_CELLS = 28
PICTURE_DECADES = (1, 7)
"""Range of the latency picture: 10 us to 10 s, in powers of ten of a microsecond."""
BAR_CELLS = 16
LEVELS = " ▁▂▃▄▅▆▇█"


@click.command()
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...")
@click.option("--own", is_flag=True, help="Use the engine of --server, --data or the configuration.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the temporary store: on the disk to measure.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.05, SECONDS_MAX), default=2.0, show_default=True, help="Time of each scenario."
)
@json_option
@engine_options
@pass_target
def bench(
    target: Target, scenarios: tuple[str, ...], own: bool, folder: Path | None, seconds: float, as_json: bool
) -> int:
    """Measure puts and gets on this machine; exits with 1 when a scenario could not run.

    Runs an engine of its own on a new store, and removes both.  With --own, or --server or --data, the engine named
    is measured, in a bucket that is removed at the end; what was stored there is freed by its next gc.

    SCENARIO: put-small, put-one, put-large, put-shared, get-small, get-many, get-large, get-id, get-ids, stat,
    locate, mount-read; default all.  mount-read mounts the bucket for that time, and is left out where the machine
    has no /dev/fuse.
    """
    from cli.bench.load import run_trials

    trials = _chosen(scenarios)
    where = folder or Path(tempfile.gettempdir())
    named = own or target.server is not None or target.data is not None
    with _ended_by_signals(), _ground(target if named else None, where) as (ground, pid, told):
        outcomes = list(_shown(run_trials(ground, trials, seconds, pid), trials, quiet=as_json))
    if as_json:
        write_json(
            {"machine": _machine(), "engine": told, "seconds": seconds, "scenarios": [o.as_json() for o in outcomes]}
        )
    else:
        _draw(outcomes, told)
    # A scenario that was left out counts as a failure only if it was asked for by name.
    failed = (o.could_not_run or (o.left_out and o.trial.name in scenarios) for o in outcomes)
    return 1 if any(failed) else 0


def _chosen(names: Sequence[str]) -> list[Trial]:
    from cli.bench.load import TRIALS

    known = {trial.name: trial for trial in TRIALS}
    for name in names:
        if name not in known:
            raise click.UsageError(f"no such scenario: {name}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(TRIALS)


@contextmanager
def _ground(target: Target | None, folder: Path) -> Iterator[tuple[Ground, int | None, str]]:
    """The place to measure, the engine's process id if it is ours, and its description.  Cleaned up at the end."""
    from cli.bench.engine import temporary_engine
    from cli.bench.load import Ground
    from lakefs.client.connect import connect

    if target is None:
        with temporary_engine(folder) as engine, connect(engine.address) as lake:
            yield Ground(lake, Target(engine.address)), engine.pid, f"a temporary one, its store in {folder}"
        return
    with target.open() as lake:
        ground = Ground(lake, target if target.data is None else None)
        try:
            yield ground, None, str(target.data or target.address())
        finally:
            ground.clean()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like an interrupt, so that everything it began is removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(outcomes: Iterator[Outcome], trials: Sequence[Trial], *, quiet: bool) -> Iterator[Outcome]:
    """Yield the same outcomes, with a bar on a terminal or a line each elsewhere; `quiet`: with neither."""
    if quiet or not sys.stderr.isatty():
        for outcome in outcomes:
            if not quiet:
                notice(f"{outcome.trial.name}: {_untried(outcome) or 'done'}")
            yield outcome
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(trials[0].what, total=len(trials))
        for number, outcome in enumerate(outcomes, 1):
            following = trials[number].what if number < len(trials) else "removing it all"
            progress.update(task, completed=number, description=following)
            yield outcome


def _draw(outcomes: Sequence[Outcome], told: str) -> None:
    from rich.console import Console
    from rich.table import Table

    fastest = max((outcome.bytes_per_s for outcome in outcomes), default=0.0)
    table = Table(title=f"Engine: {told}", title_justify="left", caption=_caption(), caption_justify="left")
    table.add_column("")
    for title in ("op/s", "bytes/s", "p50", "p99", "p99.9", "engine CPU/op"):
        table.add_column(title, justify="right")
    for title in ("throughput", "latency, 10 us to 10 s"):
        table.add_column(title, no_wrap=True)
    for outcome in outcomes:
        if untried := _untried(outcome):
            table.add_row(f"{outcome.trial.what}\n{untried}")
            continue
        table.add_row(
            outcome.trial.what,
            f"{outcome.operations_per_s:,.0f}",
            f"{human_bytes(outcome.bytes_per_s)}/s" if outcome.moved_bytes else "",
            *(_duration(outcome.percentile_us(share)) for share in (0.5, 0.99, 0.999)),
            _cpu(outcome),
            bar(outcome.bytes_per_s, fastest),
            picture(outcome.latencies),
        )
    # Output that is not a terminal has no width to break lines for.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def _untried(outcome: Outcome) -> str:
    """Return the reason for missing figures; empty if there are figures."""
    if outcome.left_out:
        return f"left out: {outcome.left_out}"
    return f"could not run: {outcome.could_not_run}" if outcome.could_not_run else ""


def _caption() -> str:
    facts = _machine()
    return f"{facts['processor']}, {facts['cpus']} processors, Linux {facts['kernel']}, lake {facts['version']}"


def _machine() -> dict[str, Any]:
    import os

    from lakefs.version import VERSION

    models = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    processor = next(models, platform.machine()).rpartition(":")[2].strip()
    return {"processor": processor, "cpus": os.cpu_count(), "kernel": platform.release(), "version": VERSION}


def _cpu(outcome: Outcome) -> str:
    if outcome.engine_cpu_s is None or not outcome.calls:
        return ""
    return _duration(outcome.engine_cpu_s * 1e6 / (outcome.calls * outcome.trial.operations))


def _duration(value_us: float) -> str:
    for limit, unit in ((1e6, "s"), (1e3, "ms")):
        if value_us >= limit:
            return f"{value_us / limit:.3g} {unit}"
    return f"{value_us:.3g} us"


def bar(value: float, highest: float) -> str:
    """Return the share of the highest as a row of blocks."""
    return "█" * round(BAR_CELLS * value / highest) if highest else ""


def picture(latencies: Histogram) -> str:
    """Return a histogram as text: a column for each step of a logarithmic scale, the tallest for the most calls."""
    import math

    low, high = PICTURE_DECADES
    counts = [0] * PICTURE_CELLS
    for lowest_ns, count in latencies.buckets():
        decade = math.log10(max(1.0, lowest_ns / 1e3))
        cell = int((decade - low) / (high - low) * PICTURE_CELLS)
        counts[min(max(0, cell), PICTURE_CELLS - 1)] += count
    most = max(counts)
    return "".join(LEVELS[math.ceil(count / most * (len(LEVELS) - 1))] if most else " " for count in counts)
