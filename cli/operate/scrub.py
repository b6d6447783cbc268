"""`lake scrub`: reads and checks every stored byte while the store serves, and reports the damage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import escaped, human_bytes, iso_time, json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import Unchecked

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake

EXIT_DAMAGED = 1
STEP_S = 1.0
TELL_EVERY = 10


@click.group(invoke_without_command=True)
@click.option("--rate", metavar="BYTES", help="Read at most so much a second, as 100M; 0: as fast as it goes.")
@click.option("--restart", is_flag=True, help="Begin a new pass instead of going on with the one begun.")
@json_option
@engine_options
@pass_target
def scrub(where: Target, rate: str | None, restart: bool, as_json: bool) -> int:
    """Read and check everything that is stored.  Continues where it was left; runs beside readers and writers.

    Ctrl-C leaves the pass where it is; the engine, or the next lake scrub, continues it.  Damaged chunks are
    quarantined: put the same bytes again, and every object that they belong to is whole.

    Exits with 0 when nothing is damaged, 1 when something is, 2 when a member of a lake could not be checked.  An
    engine also scrubs by itself (scrub_interval, scrub_rate).
    """
    if click.get_current_context().invoked_subcommand is not None:
        return 0
    from lakefs.config.settings import parse_size

    rate_bytes_per_s = None if rate is None else parse_size(rate)
    with where.open() as lake:
        _read_all(lake, rate_bytes_per_s, restart, tell=not as_json)
        report = lake.scrub(damaged=True)
    _tell(report, as_json)
    return _exit_code(report)


@scrub.command()
@json_option
@engine_options
@pass_target
def status(where: Target, as_json: bool) -> int:
    """Show the position of scrub, the result of the last full pass, and the objects that damage touches."""
    with where.open() as lake:
        report = lake.scrub(damaged=True)
    _tell(report, as_json)
    return _exit_code(report)


def _exit_code(report: dict[str, Any]) -> int:
    """Return the exit code; members of a lake that are away could not be checked."""
    if report["damaged"]:
        return EXIT_DAMAGED
    return Unchecked.exit_code if report.get("unchecked") else 0


def _read_all(lake: Lake, rate: int | None, restart: bool, *, tell: bool) -> None:
    """Continue, a second at a time, until a pass ends."""
    steps = 0
    while True:
        report = lake.scrub(for_s=STEP_S, rate_bytes_per_s=rate, restart=restart and steps == 0)
        steps += 1
        if report["done"]:
            return
        if tell and steps % TELL_EVERY == 0:
            notice(f"{report['position']:.1%}, {human_bytes(report['checked_bytes'])} checked")


def _tell(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    if report["state"] != "idle":
        done = f"{report['position']:.1%}, {report['checked_chunks']} chunks"
        write_line(f"{report['state']}: {done}, {human_bytes(report['checked_bytes'])} checked in this pass")
    last = report["last_pass"]
    if last["ended_ns"]:
        seconds = max((last["ended_ns"] - last["began_ns"]) / 1e9, 1e-3)
        size = last["checked_bytes"]
        write_line(
            f"last full pass {iso_time(last['ended_ns'])}: {last['chunks']} chunks, {human_bytes(size)}, "
            f"{human_bytes(size / seconds)}/s, {last['damage_found']} damaged"
        )
    else:
        write_line("no full pass yet")
    for item in report["damaged"]:
        objects = item["objects"] or ["no object: gc frees it"]
        for name in objects:
            told = f"{escaped(name)}: chunk {item['chunk']}: {escaped(item['reason'])}"
            write_line(f"damage: {told} [{item['code']}]")
    for missed in report.get("unchecked", []):
        write_line(f"not checked: {escaped(missed['object'])}: {escaped(missed['reason'])}")
    quarantined = report["quarantined_chunks"]
    if quarantined > len(report["damaged"]):
        write_line(f"and {quarantined - len(report['damaged'])} more damaged chunks")
    write_line(f"{quarantined} chunks in quarantine" if quarantined else "nothing is damaged")
