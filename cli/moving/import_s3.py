"""`lake import`: the objects of another S3 store, with all that they have, into the lake."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from cli.moving.filter_options import filter_options, rules_given
from cli.terminal.output import json_option, notice
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import InvalidArgument, KeyNotFound

if TYPE_CHECKING:
    from cli.moving.importer import Callbacks, Runner
    from cli.moving.sync_account import Pace, SyncAccount
    from lakefs.client.blocking.lake import Lake
    from lakefs.names import Name
    from lakefs.sync.report import SyncOutcome, SyncTotals

SCHEME = "s3://"


@click.command("import")
@click.argument("source", metavar="s3://BUCKET[/PREFIX]")
@click.argument("target", metavar="BUCKET[/PREFIX]")
@click.option("--endpoint-url", metavar="URL", help="The other store; else AWS_ENDPOINT_URL, else AWS.")
@click.option("--region", metavar="NAME", help="Its region; else AWS_DEFAULT_REGION, else that of the profile.")
@click.option("--profile", metavar="NAME", help="Credentials of this profile; else AWS_PROFILE, or the environment's.")
@click.option("--anonymous", is_flag=True, help="Do not sign: the bucket is public.")
@click.option("--versions", is_flag=True, help="All versions and delete markers; the target bucket keeps versions.")
@click.option("--no-tags", is_flag=True, help="Do not ask for tags, which takes a permission and a request.")
@filter_options
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be imported, and do nothing.")
@click.option("--bwlimit", metavar="RATE", default="0", help="Bytes a second at most, as 10M; 0 is no limit.")
@click.option("-j", "--jobs", type=click.IntRange(1, 32), default=8, help="Objects that are imported at once.")
@click.option("-q", "--quiet", is_flag=True, help="No bar, no summary.")
@json_option
@engine_options
@pass_target
def import_s3(where: Target, /, source: str, target: str, **options: Any) -> int:
    """Bring the objects of an S3 bucket (AWS, MinIO, any other) into the lake.

    Names, content, content type, metadata, tags and times are kept, and so are ETags.  What is below PREFIX/ lands
    below that of the target; a bucket that does not exist is made.  Credentials and settings are those of boto3, which
    has to be installed: the environment, ~/.aws, a role.

    The bytes of each object are compared with its ETag before the name is bound.  Where an ETag says nothing about the
    bytes (encrypted with keys of KMS, parts of unknown lengths) the size is compared, and that is reported.

    Objects that the lake has with the same size and ETag are left alone, so an import that was stopped goes on with the
    rest.  Nothing is removed; what the lake has under a name of the source, and is not the same, is replaced.  The exit
    code is 0 when all is in the lake, and 1 when something failed.
    """
    from cli.moving.importer import Importer, ImportOptions
    from cli.moving.s3_source import open_source
    from cli.moving.sync_account import EXIT_NOT_IN_STEP, Pace, SyncAccount
    from lakefs.config.values import parse_size

    rules = rules_given(options)
    bucket, prefix = _source_of(source)
    name = _target_of(target)
    pace = Pace(parse_size(options["bwlimit"]))
    jobs = options["jobs"]
    s3 = open_source(
        bucket,
        endpoint_url=options["endpoint_url"],
        region=options["region"],
        profile=options["profile"],
        anonymous=options["anonymous"],
        jobs=jobs,
    )
    with contextlib.ExitStack() as stack:
        lake = stack.enter_context(where.open(create=not options["dry_run"]))
        runners: list[Runner] = [driver_of(lake)]
        if where.data is None:
            runners += [driver_of(stack.enter_context(where.open())) for _ in range(jobs - 1)]
        if not options["dry_run"]:
            _make_bucket(lake, name.bucket, versions=options["versions"])
        account = SyncAccount(
            as_json=options["as_json"], quiet=options["quiet"], dry_run=options["dry_run"], pace=pace, title="import"
        )
        with account:
            counts = _Counts(account, pace)
            settings = ImportOptions(rules, tags=not options["no_tags"], dry_run=options["dry_run"])
            importer = Importer(s3, prefix, name, runners, settings, counts.callbacks())
            seen = importer.run_versions(jobs) if options["versions"] else importer.run(jobs)
            if not seen:
                raise KeyNotFound(f"{source} holds no object, or none that the patterns take", subject=source)
            account.totals = counts.totals
        if counts.by_size and not options["quiet"]:
            notice(f"lake: {counts.by_size} objects were checked by their size only: their ETag says no more")
    return 0 if counts.totals.is_in_step else EXIT_NOT_IN_STEP


class _Counts:
    """The totals of an import."""

    def __init__(self, account: SyncAccount, pace: Pace) -> None:
        from lakefs.sync.report import SyncTotals

        self.totals: SyncTotals = SyncTotals()
        self.by_size = 0
        self._account = account
        self._pace = pace

    def callbacks(self) -> Callbacks:
        """Return what the importer calls."""
        from cli.moving.importer import Callbacks

        return Callbacks(self._outcome, self._account.observer.planned, self._unchanged, self._pace.moved)

    def _outcome(self, outcome: SyncOutcome) -> None:
        from cli.moving.importer import BY_SIZE
        from lakefs.sync.report import Done

        self.totals.count(outcome)
        self.by_size += outcome.reason == BY_SIZE
        if outcome.done is Done.COPIED:
            self._account.count_bytes(outcome.size_bytes)
        self._account.note(outcome)

    def _unchanged(self) -> None:
        self.totals.unchanged += 1


def _source_of(text: str) -> tuple[str, str]:
    """Return bucket and prefix of a source; the prefix is empty, or ends in a slash.  InvalidArgument."""
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    if not text.startswith(SCHEME) or not bucket:
        raise InvalidArgument(f"{text} is no S3 source; write s3://BUCKET or s3://BUCKET/PREFIX", subject=text)
    return bucket, key if not key or key.endswith("/") else key + "/"


def _target_of(text: str) -> Name:
    from lakefs.names import Name, check_path, parse_name

    name = check_path(parse_name(text))
    return name if name.is_folder else Name(name.bucket, name.key + "/")


def _make_bucket(lake: Lake, bucket: str, *, versions: bool) -> None:
    """Make the target's bucket, if it is missing.  InvalidArgument if it keeps no versions, and they are wanted."""
    if not lake.exists(f"{bucket}/"):
        lake.create_bucket(bucket)
        notice(f"lake: bucket {bucket} did not exist, and was made")
        if versions:
            lake.set_bucket(bucket, versioning="enabled")
    elif versions and lake.bucket(bucket).versioning != "enabled":
        raise InvalidArgument(
            f"bucket {bucket} keeps no versions; change that with: lake bucket set {bucket} --versioning enabled",
            subject=bucket,
        )
