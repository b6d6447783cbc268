"""`lake fsck`: checks a store, does the repairs that are certain or rebuilds its index, and reports.

Through a running engine it only checks the store.  `--repair` and `--rebuild` need the store closed, and --data; while
an engine has it they fail with Unchecked (exit code 2).

The report is one document (docs/operations.md, "The report"); its outcome is the exit code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from cli.terminal.output import escaped, human_bytes, json_option, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import CorruptionError, InvalidArgument, LakeError, StoreUnusable, Unchecked
from lakefs.findings import Finding

if TYPE_CHECKING:
    from lakefs.client.blocking.lake import Lake

REPORT_FORMAT: Final = 1
EXIT_CODES: Final = {"clean": 0, "damaged": 1, "refused": 2, "repaired": 3}
FINDINGS_SHOWN: Final = 50
_EMPTY: Final[dict[str, Any]] = {"level": "", "damage": 0, "notes": 0, "checked": {}, "findings": [], "repairs": []}


@dataclass(frozen=True)
class _Wish:
    """The options given."""

    full: bool
    repair: bool
    rebuild: bool
    accept_loss: bool


@click.command()
@click.option("--full", is_flag=True, help="Read and check every stored byte, too.")
@click.option("--repair", is_flag=True, help="Do what is certain, and say what was done; needs --data.")
@click.option("--rebuild", is_flag=True, help="First make the index anew from the journal; needs --data.")
@click.option("--accept-loss", is_flag=True, help="With --rebuild: give up all from a damaged place of the journal on.")
@json_option
@engine_options
@pass_target
def fsck(where: Target, full: bool, repair: bool, rebuild: bool, accept_loss: bool, as_json: bool) -> int:
    """Check the store.  Quick: all records, places and names.  Full: every byte as well.

    Exits with 0 when nothing is damaged, 1 when something is, 2 when it could not be checked, 3 when --repair did
    something and nothing is damaged any more.  Garbage is a note, not damage.  With --data the store is opened here,
    without an engine.  Of a lake, every member and the names are checked, and every object against the members; a
    member that is away could not be checked.

    --repair removes no file that may still be wanted: a bad file is renamed into the store's folder set-aside.  Damaged
    content stays damaged, by name, until the same bytes are put again.
    """
    wish = _Wish(full, repair, rebuild, accept_loss)
    _refuse_nonsense(where, wish)
    try:
        report = _check(where, wish)
    except LakeError as error:
        outcome = "damaged" if isinstance(error, CorruptionError) else "refused"
        if as_json:
            found = {"damage": 1, "findings": [_finding_of(error)]} if outcome == "damaged" else {}
            write_json(_document(found, outcome))
        if outcome == "damaged":
            raise
        raise Unchecked(f"the store could not be checked: {error.message}", subject=error.subject) from error
    outcome = _outcome(report)
    if as_json:
        write_json(_document(report, outcome))
    else:
        _tell(report)
    return EXIT_CODES[outcome]


def _outcome(report: dict[str, Any]) -> str:
    """Return the outcome; of a lake whose members did not all answer, "refused" unless there is damage."""
    if report["damage"]:
        return "damaged"
    return "refused" if report.get("unchecked") else "repaired" if report["repairs"] else "clean"


def _refuse_nonsense(where: Target, wish: _Wish) -> None:
    for option, is_given in (("--repair", wish.repair), ("--rebuild", wish.rebuild)):
        if is_given and where.data is None:
            raise InvalidArgument(f"{option} works on a closed store: stop the engine, and give --data DIR")
    if wish.repair and wish.rebuild:
        raise InvalidArgument("--repair makes the index anew where it is needed: give it without --rebuild")
    if wish.accept_loss and not wish.rebuild:
        raise InvalidArgument("--accept-loss goes with --rebuild")


def _document(report: dict[str, Any], outcome: str) -> dict[str, Any]:
    return {"format": REPORT_FORMAT, "outcome": outcome, **_EMPTY, **report}


def _finding_of(error: LakeError) -> dict[str, str]:
    return error.finding.as_json(error.subject, error.message)


def _check(where: Target, wish: _Wish) -> dict[str, Any]:
    if where.data is None:
        with where.open() as lake:
            return {**_EMPTY, **lake.fsck(full=wish.full)}
    if wish.rebuild:
        from engine.fsck.repair import rebuild

        rebuilt = rebuild(where.data, accept_loss=wish.accept_loss)
        with where.open() as lake:
            return {**_EMPTY, **lake.fsck(full=wish.full), "rebuilt": rebuilt}
    from engine.fsck.repair import check_files

    files = check_files(where.data, repair=wish.repair).as_dict()
    repairs, found = files["repairs"], files["findings"]
    report: dict[str, Any] = {**_EMPTY, "level": "files"}
    if files["can_be_opened"]:
        try:
            with where.open() as lake:
                report |= _settled(lake, wish, files) if wish.repair else lake.fsck(full=wish.full)
        except (CorruptionError, StoreUnusable) as error:
            if not found:
                raise
            report["findings"] = [_finding_of(error)]
            report["damage"] = 1
    told = {finding["object"] for finding in report["findings"]}
    more = [finding for finding in found if finding["object"] not in told]
    report["damage"] += sum(finding["severity"] == "damage" for finding in more)
    report["notes"] += sum(finding["severity"] == "note" for finding in more)
    return {**report, "findings": [*more, *report["findings"]], "repairs": repairs}


def _settled(lake: Lake, wish: _Wish, files: dict[str, Any]) -> dict[str, Any]:
    """Collect garbage if nothing is damaged, then check as requested; damaged chunks are then in quarantine."""
    if not files["findings"] and not lake.fsck()["damage"]:
        collected = lake.gc()
        freed, segments = collected["freed_chunks"], collected["removed_segments"]
        segments += collected["compaction"]["removed_segments"]
        if freed or segments:
            action = f"collected: {freed} chunks, {human_bytes(collected['freed_bytes'])}, {segments} segments"
            code = Finding.GARBAGE.code
            files["repairs"].append(
                {"code": code, "object": "store", "problem": "garbage", "action": action, "kept_as": ""}
            )
    report = lake.fsck(full=wish.full)
    return {**report, "quarantine": lake.scrub(damaged=True)["damaged"]}


def _tell(report: dict[str, Any]) -> None:
    if "rebuilt" in report:
        _tell_rebuilt(report["rebuilt"])
    for repair in report["repairs"]:
        kept = f"; kept as {repair['kept_as']}" if repair["kept_as"] else ""
        write_line(
            f"repaired: {escaped(repair['object'])}: {escaped(repair['problem'])}: {repair['action']}{kept} "
            f"[{repair['code']}]"
        )
    findings = report["findings"]
    for finding in findings[:FINDINGS_SHOWN]:
        told = f"{escaped(finding['object'])}: {escaped(finding['message'])}"
        write_line(f"{finding['severity']}: {told} [{finding['code']}]")
    if len(findings) > FINDINGS_SHOWN:
        write_line(f"and {len(findings) - FINDINGS_SHOWN} more; --json lists them")
    if report.get("quarantine"):
        write_line(f"{len(report['quarantine'])} chunks in quarantine; put the same bytes again to restore them")
    looked = ", ".join(f"{count} {what}" for what, count in report["checked"].items())
    for missed in report.get("unchecked", []):
        write_line(f"not checked: {escaped(missed['object'])}: {escaped(missed['reason'])}")
    damage = report["damage"]
    verdict = f"{damage} damaged" if damage else "nothing is damaged"
    write_line(f"{report['level']} check: {verdict}, {report['notes']} notes; looked at {looked or 'files only'}")


def _tell_rebuilt(rebuilt: dict[str, Any]) -> None:
    write_line(f"rebuilt the index: {rebuilt['records']} records, up to sequence {rebuilt['end_sequence']}")
    if rebuilt["lost_from_sequence"]:
        lost = f"all from sequence {rebuilt['lost_from_sequence']} on is lost"
        write_line(f"gave up: {rebuilt['lost_because']}; {lost}")
