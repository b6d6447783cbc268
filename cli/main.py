"""`lake`: the command line's root, and the one place where errors become messages and exit codes.

A command's module is imported only when the command runs, and commands import what they need inside: `lake --version`
answers in well under 80 ms.  Nothing here knows the store.

Exit codes come from the error table (docs/reference.md); 2 is a usage error, 130 an interrupt, 141 a closed pipe.  A
command may return one of its own.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Final

import click

from cli.terminal.streams import encode_in_utf8, prepare
from cli.terminal.target import Target, engine_options
from lakefs.errors import LakeError, LocalFileError
from lakefs.version import version_text

EXIT_USAGE: Final = 2
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

_WRITE_FAILS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EAGAIN, errno.ECONNRESET, errno.ESTALE}
)
"""Errors of a write to stdout."""
COMMANDS: Final = {
    "serve": "cli.serve.serve:serve",
    "gateway": "cli.serve.gateway:gateway",
    "ls": "cli.objects.ls:ls",
    "put": "cli.objects.put:put",
    "get": "cli.objects.get:get",
    "cat": "cli.objects.get:cat",
    "stat": "cli.objects.ls:stat",
    "rm": "cli.objects.remove:rm",
    "mv": "cli.objects.rename_and_copy:mv",
    "cp": "cli.objects.rename_and_copy:cp",
    "du": "cli.objects.ls:du",
    "find": "cli.objects.find:find",
    "tree": "cli.objects.tree:tree",
    "versions": "cli.objects.versions:versions",
    "sync": "cli.moving.sync:sync",
    "diff": "cli.moving.diff:diff",
    "import": "cli.moving.import_s3:import_s3",
    "bucket": "cli.objects.buckets:bucket",
    "key": "cli.objects.keys:key",
    "presign": "cli.objects.presign:presign",
    "kv": "cli.objects.spaces:kv",
    "mount": "cli.mount.commands:mount",
    "unmount": "cli.mount.commands:unmount",
    "staged": "cli.mount.staged:staged",
    "gc": "cli.operate.status:gc",
    "fsck": "cli.operate.fsck:fsck",
    "scrub": "cli.operate.scrub:scrub",
    "status": "cli.operate.status:status",
    "cluster": "cli.operate.cluster:cluster",
    "config": "cli.operate.config:config",
    "doctor": "cli.operate.doctor:doctor",
    "bench": "cli.bench.bench:bench",
    "completion": "cli.operate.completion:completion",
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        module_name, attribute = place.split(":")
        command = getattr(import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"lake {version_text()}")
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show version and commit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@engine_options
def lake(debug: bool) -> None:
    """A storage appliance: buckets, folders and objects, put, got and listed.

    Names are BUCKET/KEY; a key that ends in / is a folder.  lake:// before a name is accepted.
    """


def main() -> None:
    """Run the command line of this process and exit."""
    prepare()
    sys.exit(run(sys.argv[1:]))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code.  Messages are written to stderr, as JSON with --json."""
    if "_LAKE_COMPLETE" in os.environ:
        import_module("cli.terminal.completing")  # bash's own way is in it
        lake.main(args, prog_name="lake", obj=Target())
    try:
        return _invoke(_of_mount_fuse(args) or args)
    except click.ClickException as error:
        return _usage_error(error, args)
    except LakeError as error:
        _debug(args)
        return _show(error, args)
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        _debug(args)
        if error.filename is not None or error.errno not in _WRITE_FAILS:
            return _bug(error, args)  # commands translate the errors of their own files themselves
        _silence_stdout()
        return _show(LocalFileError(f"stdout: {error.strerror}"), args)
    except Exception as error:  # noqa: BLE001  # the edge: any other error is a bug, and reported as one
        _debug(args)
        return _bug(error, args)


def _of_mount_fuse(args: list[str]) -> list[str] | None:
    """Return the `lake` call that mount.fuse3 means by `lake SOURCE DIR -o OPTIONS`; None for any other call."""
    if len(args) != 4 or args[2] != "-o" or args[0] in COMMANDS:
        return None
    from cli.mount.fstab import from_mount_fuse

    return from_mount_fuse(args)


def _invoke(args: list[str]) -> int:
    encode_in_utf8()
    try:
        with lake.make_context("lake", list(args), obj=Target()) as context:
            code = lake.invoke(context)
    except click.exceptions.Exit as end:
        code = end.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _usage_error(error: click.ClickException, args: list[str]) -> int:
    from cli.terminal.suggestions import suggested

    error = suggested(error)
    if "--json" in args:
        _json_error("UsageError", error.format_message(), "", error.exit_code)
    else:
        error.show()
    return error.exit_code


def _show(error: LakeError, args: list[str]) -> int:
    if "--json" in args:
        _json_error(type(error).__name__, error.message, error.subject, error.exit_code)
    else:
        click.echo(f"lake: {error.message}", err=True)
    return error.exit_code


def _bug(error: Exception, args: list[str]) -> int:
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    message = f"unexpected {reason}; this is a bug: run again with lake --debug and report what it shows"
    if "--json" in args:
        _json_error("Unexpected", message, "", EXIT_BUG)
    else:
        click.echo(f"lake: {message}", err=True)
    return EXIT_BUG


def _json_error(kind: str, message: str, subject: str, exit_code: int) -> None:
    import json

    found = {"error": kind, "message": message, "subject": subject, "exit_code": exit_code}
    click.echo(json.dumps(found), err=True)


def _debug(args: list[str]) -> None:
    if "--debug" in args:
        import traceback

        traceback.print_exc()


def _silence_stdout() -> None:
    """Point stdout at /dev/null: its reader has closed it, and buffered output must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
