"""`lake sync`: make one side, a folder or a prefix of a bucket, have what another has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.moving.filter_options import filter_options, rules_given
from cli.terminal.completing import complete_sources
from cli.terminal.output import json_option, notice
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import InvalidArgument, LakeError

if TYPE_CHECKING:
    from cli.moving.sides import Place
    from lakefs.sync.filters import Rules
    from lakefs.sync.report import SyncTotals
    from lakefs.sync.sync import SyncOptions


@click.command()
@click.argument("source", metavar="SRC", shell_complete=complete_sources)
@click.argument("target", metavar="DST", shell_complete=complete_sources)
@click.option("--delete", is_flag=True, help="Remove from DST what SRC does not have.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("-c", "--checksum", is_flag=True, help="Compare sizes and contents, instead of sizes and times.")
@click.option("-u", "--update", is_flag=True, help="Leave files that are newer at DST.")
@filter_options
@click.option("--follow", is_flag=True, help="Follow symbolic links of a local SRC; write through those of DST.")
@click.option("--no-create", is_flag=True, help="Fail when the bucket of DST does not exist, instead of making it.")
@click.option("--bwlimit", metavar="RATE", default="0", help="Bytes a second at most, as 10M; 0 is no limit.")
@click.option("--watch", is_flag=True, help="Go on: sync again whenever SRC changes, until Ctrl-C.")
@click.option("--to-server", metavar="ADDRESS", help="The engine of DST, when it is another than that of SRC.")
@click.option("--to-token-file", type=click.Path(path_type=Path), metavar="FILE", help="Its token; else LAKE_TOKEN.")
@click.option("-j", "--jobs", type=click.IntRange(1, 32), default=4, help="Batches of small files in flight.")
@click.option("-q", "--quiet", is_flag=True, help="No bar, no summary.")
@json_option
@engine_options
@pass_target
def sync(where: Target, /, source: str, target: str, **options: Any) -> int:
    """Make DST have what SRC has.

    Each side is a local folder (/a, ./a, ../a) or BUCKET/PREFIX (lake://BUCKET/PREFIX); one at least is in the lake.
    A name without such a beginning is what exists.  What is in SRC lands in DST.

    Files of the same size and modification time (and mode) are taken to be the same, as rclone and rsync do.  A sync
    has one direction: what differs at DST is overwritten, also where DST is newer; --update leaves that.

    --delete removes nothing when SRC does not exist, has no file, or could not be read whole, or when a file could
    not be copied.  Patterns are rclone's: * ** ? [a-z] {a,b}, / first for the top of a side, / last for a folder; names
    that they leave out are neither copied nor removed.

    A name that DST cannot have, a symbolic link, and a file that fails are reported and skipped.  The exit code is 0
    when DST is in step, and 1 when something was skipped, failed, or was not removed.  A sync that was killed is begun
    again by the same command: what was copied is not copied again.
    """
    from cli.moving.sides import open_lakes, places_of
    from cli.moving.sync_account import EXIT_NOT_IN_STEP, Pace
    from cli.moving.watching import follow_source
    from lakefs.config.values import parse_size

    rules = rules_given(options)
    pace = Pace(parse_size(options["bwlimit"]))
    if options["watch"] and options["dry_run"]:
        raise InvalidArgument("--watch and --dry-run do not go together")
    with open_lakes(where, options["to_server"], options["to_token_file"], source=source) as lakes:
        places = places_of(source, target, lakes)
        run = _Runs(places, rules, pace, options)
        if options["watch"]:
            totals = follow_source(
                places[0],
                rules,
                run.once,
                is_embedded=where.data is not None,
                token=where.token(),
                follow=options["follow"],
            )
        else:
            totals = run.once()
    return 0 if totals.is_in_step else EXIT_NOT_IN_STEP


class _Runs:
    """Passes of one sync."""

    def __init__(self, places: tuple[Place, Place], rules: Rules, pace: Any, options: dict[str, Any]) -> None:
        self._source, self._target = places
        self._rules = rules
        self._pace = pace
        self._options = options

    def once(self) -> SyncTotals:
        """Run one pass; return its totals."""
        from cli.moving.sides import runner_of, side_of
        from cli.moving.sync_account import SyncAccount
        from lakefs.sync.sync import sync as run_sync

        options = self._options
        follow = options["follow"]
        sides = (
            side_of(self._source, self._target, self._rules, follow=follow),
            side_of(self._target, self._source, self._rules, may_miss=True),
        )
        with SyncAccount(
            as_json=options["as_json"],
            quiet=options["quiet"],
            dry_run=options["dry_run"],
            pace=self._pace,
            is_silent_if_idle=options["watch"],
        ) as account:
            driver = runner_of(self._source, self._target)
            with self._new_bucket_noted():
                account.totals = driver.run(run_sync(driver.steps, *sides, self._sync_options(), account.observer))
        return account.totals

    def _sync_options(self) -> SyncOptions:
        from lakefs.sync.entries import Comparison
        from lakefs.sync.sync import SyncOptions

        options = self._options
        return SyncOptions(
            Comparison(contents=options["checksum"], update=options["update"]),
            delete=options["delete"],
            dry_run=options["dry_run"],
            create_bucket=not options["no_create"],
            follow=options["follow"],
            jobs=options["jobs"],
        )

    @contextlib.contextmanager
    def _new_bucket_noted(self) -> Iterator[None]:
        """Report a bucket that the pass makes: the name may have been a mistake."""
        from lakefs.names import check_new_bucket_name

        target = self._target
        if target.is_folder or self._options["dry_run"] or target.lake.exists(f"{target.name.bucket}/"):
            yield
            return
        bucket = target.name.bucket
        if self._options["no_create"]:
            target.lake.bucket(bucket)
        check_new_bucket_name(bucket)
        try:
            yield
        finally:
            with contextlib.suppress(LakeError):
                if target.lake.exists(f"{bucket}/") and not self._options["quiet"]:
                    notice(f"lake: bucket {bucket} did not exist, and was made")
