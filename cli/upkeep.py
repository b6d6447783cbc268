"""`lake status`, `lake gc`, `lake fsck`: how the store does, and keeping it well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cli.output import escaped, human_bytes, json_option, write_json, write_line
from cli.target import Target, engine_options, target_of
from lakefs.errors import CorruptionError, InvalidArgument, LakeError, StoreReadOnly, Unchecked

if TYPE_CHECKING:
    from pathlib import Path

EXIT_DAMAGED = 1
FINDINGS_SHOWN = 50


@click.command()
@json_option
@engine_options
@click.pass_context
def status(context: click.Context, as_json: bool) -> int:
    """Show the state of the engine; exits with 0 when it serves, with 74 when it only reads."""
    with target_of(context).open() as lake:
        found = lake.status()
    if as_json:
        write_json(found)
    else:
        for line in _lines(found):
            write_line(line)
    return 0 if found.get("state") == "serving" else StoreReadOnly.exit_code


@click.command()
@click.option(
    "--compact", is_flag=True, help="Also move what lives out of segments that hold little garbage."
)
@json_option
@engine_options
@click.pass_context
def gc(context: click.Context, compact: bool, as_json: bool) -> None:
    """Free what no name refers to any more.  Runs beside readers and writers."""
    with target_of(context).open() as lake:
        report = lake.gc(compact=compact)
    if as_json:
        write_json(report)
        return
    for line in _lines(report):
        write_line(line)


@click.command()
@click.option("--full", is_flag=True, help="Read and check every stored byte, too.")
@click.option("--rebuild", is_flag=True, help="First make the index anew from the journal; needs --data.")
@click.option(
    "--accept-loss", is_flag=True, help="With --rebuild: give up all from a damaged place of the journal on."
)
@json_option
@engine_options
@click.pass_context
def fsck(context: click.Context, full: bool, rebuild: bool, accept_loss: bool, as_json: bool) -> int:
    """Check the store.  Quick: all records, places and names.  Full: every byte as well.

    Exits with 0 when nothing is damaged, 1 when something is, 2 when it could not be checked.  Garbage is a note,
    not damage.  With --data the store is opened here, without an engine.
    """
    where = target_of(context)
    if rebuild and where.data is None:
        raise InvalidArgument("--rebuild works on a closed store: stop the engine, and give --data DIR")
    if accept_loss and not rebuild:
        raise InvalidArgument("--accept-loss goes with --rebuild")
    try:
        report = _check(where, full, rebuild, accept_loss)
    except CorruptionError:
        raise
    except LakeError as error:
        raise Unchecked(f"the store could not be checked: {error.message}", subject=error.subject) from error
    if as_json:
        write_json(report)
    else:
        _tell_findings(report)
    return EXIT_DAMAGED if report.get("damage") else 0


def _check(where: Target, full: bool, rebuild: bool, accept_loss: bool) -> dict[str, Any]:
    rebuilt: dict[str, Any] | None = None
    if rebuild:
        assert where.data is not None
        rebuilt = _rebuild(where.data, accept_loss)
    with where.open() as lake:
        report = lake.fsck(full=full)
    return report if rebuilt is None else {**report, "rebuilt": rebuilt}


def _rebuild(data: Path, accept_loss: bool) -> dict[str, Any]:
    from engine.rebuild import rebuild

    return rebuild(data, accept_loss=accept_loss)


def _tell_findings(report: dict[str, Any]) -> None:
    rebuilt = report.get("rebuilt")
    if rebuilt:
        write_line(
            f"rebuilt the index: {rebuilt['records']} records, up to sequence {rebuilt['end_sequence']}"
        )
        if rebuilt["lost_from_sequence"]:
            reason = (
                f"{rebuilt['lost_because']}; all from sequence {rebuilt['lost_from_sequence']} on is lost"
            )
            write_line(f"gave up: {reason}")
    findings = report.get("findings", [])
    for finding in findings[:FINDINGS_SHOWN]:
        write_line(f"{finding['severity']}: {escaped(finding['object'])}: {escaped(finding['message'])}")
    if len(findings) > FINDINGS_SHOWN:
        write_line(f"and {len(findings) - FINDINGS_SHOWN} more; --json lists them")
    looked = ", ".join(f"{count} {what}" for what, count in report.get("checked", {}).items())
    damage = report.get("damage", 0)
    verdict = f"{damage} damaged" if damage else "nothing is damaged"
    write_line(
        f"{report.get('level', '')} check: {verdict}, {report.get('notes', 0)} notes; looked at {looked}"
    )


def _lines(figures: dict[str, Any], prefix: str = "") -> list[str]:
    """A nested report as lines of name and value; sizes in units."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines.extend(_lines(value, f"{prefix}{name}."))
            continue
        text = human_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
        lines.append(f"{prefix + name:<36} {escaped(text)}".rstrip())
    return lines
