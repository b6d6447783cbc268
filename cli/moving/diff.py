"""`lake diff`: the names that only one of two sides has, and those that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from cli.moving.filter_options import filter_options, rules_given
from cli.terminal.output import JsonList, escaped, json_option, notice, shown, write_line
from cli.terminal.target import Target, engine_options, pass_target

EXIT_DIFFERENT: Final = 1
_SIGNS: Final = {"only in the first": "-", "only in the second": "+", "different": "*", "not compared": "!"}
"""The signs of rclone's `check --combined`, seen from the first side."""


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("-c", "--checksum", is_flag=True, help="Compare sizes and contents, instead of sizes and times.")
@filter_options
@click.option("--follow", is_flag=True, help="Follow symbolic links of local folders.")
@click.option("--to-server", metavar="ADDRESS", help="The engine of B, when it is another than that of A.")
@click.option("--to-token-file", type=click.Path(path_type=Path), metavar="FILE", help="Its token; else LAKE_TOKEN.")
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
@json_option
@engine_options
@pass_target
def diff(where: Target, /, first: str, second: str, **options: Any) -> int:
    """List the names in which A and B differ.

    Sides, comparison and patterns are those of lake sync; modes are not compared.  Each line has a sign: - only in A,
    + only in B, * different, ! not compared (a symbolic link, or a file that cannot be read).

    The exit code is 0 when both sides have the same files, 1 when they differ, and 2 for a mistake in the command.
    """
    from cli.moving.sides import open_lakes, places_of, runner_of, side_of
    from lakefs.sync.diff import Difference, Differing, diff as run_diff
    from lakefs.sync.entries import Comparison

    rules = rules_given(options)
    document = JsonList("names") if options["as_json"] else None
    counts = dict.fromkeys(Difference, 0)

    def found(one: Differing) -> None:
        counts[one.difference] += 1
        if document is not None:
            reason = {"reason": one.reason} if one.reason else {}
            document.add({"name": escaped(one.path), "difference": one.difference.value, **reason})
        else:
            reason_text = f"  ({one.reason})" if one.reason else ""
            write_line(f"{_SIGNS[one.difference]} {shown(one.path)}{reason_text}")

    with open_lakes(where, options["to_server"], options["to_token_file"]) as lakes:
        a, b = places_of(first, second, lakes)
        sides = (side_of(a, b, rules, follow=options["follow"]), side_of(b, a, rules, follow=options["follow"]))
        same = runner_of(a, b).run(run_diff(*sides, Comparison(contents=options["checksum"], modes=False), found))
    if document is not None:
        document.end({"same": same, **{difference.name.lower(): count for difference, count in counts.items()}})
    elif not options["quiet"]:
        notice(", ".join([f"{same} same", *(f"{count} {kind.value}" for kind, count in counts.items() if count)]))
    return EXIT_DIFFERENT if any(counts.values()) else 0
