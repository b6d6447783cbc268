"""`lake status` shows the state of the engine; `lake gc` frees content that no name refers to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from cli.operate.lake_lines import gc_lines, lake_lines
from cli.terminal.output import escaped, human_bytes, json_option, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import StoreReadOnly

if TYPE_CHECKING:
    from lakefs.wire.messages import SpaceStat

_SPACES_SHOWN: Final = 20


@click.command()
@json_option
@engine_options
@pass_target
def status(where: Target, as_json: bool) -> int:
    """Show the state of the engine, and of its lake; exits with 0 when it serves, with 74 when it only reads."""
    with where.open() as lake:
        found = lake.status()
        has_spaces = "lake" in found or found.get("keyed", {}).get("spaces")  # an older engine has none
        spaces = lake.spaces() if has_spaces and not as_json else []
    if as_json:
        write_json(found)
    else:
        gateways = found.pop("gateways", [])  # an older engine has none
        lake_part = found.pop("lake", None)  # one engine has none
        heads = found.pop("heads", [])  # only a machine with several has them
        shards = found.pop("names_shards", [])  # only a lake whose names are divided has them
        of_lake = [] if lake_part is None else lake_lines(lake_part, found.pop("folders", ()))
        for line in [
            *_lines(found),
            *map(_head_line, heads),
            *map(_shard_line, shards),
            *of_lake,
            *_space_lines(spaces),
            *_gateway_lines(gateways),
        ]:
            write_line(line)
    return 0 if found.get("state") == "serving" else StoreReadOnly.exit_code


@click.command()
@click.option("--compact", is_flag=True, help="Also move what lives out of segments that hold little garbage.")
@json_option
@engine_options
@pass_target
def gc(where: Target, compact: bool, as_json: bool) -> None:
    """Free what no name refers to any more.  Runs beside readers and writers."""
    with where.open() as lake:
        report = lake.gc(compact=compact)
    if as_json:
        write_json(report)
        return
    members = report.pop("members", {})  # one engine has none
    for line in [*_lines(report), *gc_lines(members)]:
        write_line(line)


def _lines(figures: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a nested report as lines of name and value; sizes in units."""
    lines: list[str] = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines.extend(_lines(value, f"{prefix}{name}."))
            continue
        text = human_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
        lines.append(_line(prefix + name, text))
    return lines


def _space_lines(spaces: Sequence[SpaceStat]) -> list[str]:
    """Return a line for each of the largest spaces of keyed blobs."""
    shown = sorted(spaces, key=lambda space: space.value_bytes, reverse=True)[:_SPACES_SHOWN]
    lines = []
    for space in shown:
        quota = f" of {human_bytes(space.quota_bytes)}" if space.quota_bytes else ", no quota"
        values = f"{space.entries} values, {human_bytes(space.value_bytes)}{quota}"
        lines.append(_line(f"space {space.name}", values))
    if len(spaces) > len(shown):
        lines.append(_line("  smaller spaces", f"{len(spaces) - len(shown)}; lake kv ls lists all"))
    return lines


def _gateway_lines(gateways: list[dict[str, Any]]) -> list[str]:
    """Return two lines for each S3 address: the answers that the door repeated, and why others were not.

    Counts are the sums of the processes that serve an address, since each began.
    """
    by_address: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for gateway in gateways:
        machine = gateway["peer"].rpartition(":")[0]  # of a client over TCP
        by_address[f"s3 {gateway['url']}{f' at {machine}' if machine else ''}"].append(gateway)
    lines = []
    for address, processes in by_address.items():
        answers, repeated = (sum(process[name] for process in processes) for name in ("answers", "repeated"))
        reasons: Counter[str] = Counter()
        for process in processes:
            reasons.update(process["passed_on"])
        text = f"{repeated} of {answers} answers given by the door"
        if not any(process["door"] for process in processes):
            text = f"{answers} answers, none repeated: no door"
        lines.append(_line(address, f"{text} ({len(processes)} processes)" if len(processes) > 1 else text))
        passed = [f"{reason} {count}" for reason, count in reasons.most_common() if count]
        if passed:
            lines.append(_line("  left to Python, by reason", ", ".join(passed)))
    return lines


def _head_line(head: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in head.items() if name != "pid")
    return _line(f"head (process {head['pid']})", counts)


def _shard_line(shard: dict[str, Any]) -> str:
    """Return the line of a part of the lake's names, beside the first one."""
    name = f"names shard {shard['shard']}"
    if "unreachable" in shard:
        return _line(name, f"unreachable: {shard['unreachable']}")
    return _line(name, f"{shard['state']}, {shard['clients']['connections']} connections")


def _line(name: str, value: str) -> str:
    return f"{escaped(name):<36} {escaped(value)}".rstrip()
