"""`lake staged ls|restore|forget`: files that a killed mount, or one without its engine, could not store.

A staged file is given by its name, or by its id if several have that name, or it has none.  Mounts may run during the
commands: files that they have open are listed and not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.terminal.output import escaped, human_bytes, iso_time, json_option, notice, shown, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.client.facade import driver_of
from lakefs.errors import EngineUnreachable, InvalidArgument, KeyNotFound, LakeError

if TYPE_CHECKING:
    from fuse.staging.leftovers import Leftover
    from fuse.staging.restore import Standing
    from lakefs.client.blocking.lake import Lake

staging_option = click.option(
    "--staging",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The staging folder of one mount; else those of all mounts of this user that have no other.",
)
all_option = click.option("--all", "everything", is_flag=True, help="All that no running mount has open.")


@click.group()
@engine_options
def staged() -> None:
    """List, restore or remove files that were written through a mount and never stored."""


@staged.command("ls")
@staging_option
@json_option
@engine_options
@pass_target
def list_(where: Target, staging: Path | None, as_json: bool) -> None:
    """List staged files, oldest first: id, bytes written and size, time, state, name.

    \b
    ready       lake staged restore puts it under its name
    changed     the name has other content by now: --to another, or --force
    incomplete  only parts were written, and the content they were written over is gone: --zeros for the rest
    unnamed     what it was is lost but for the bytes: --zeros, and --to or --file
    in use      a running mount has it open
    unknown     the engine does not answer
    """
    found = _found(staging)
    standings = _standings(where, found)
    if as_json:
        write_json({"staged": [_document(each, how) for each, how in zip(found, standings, strict=True)]})
        return
    for leftover, how in zip(found, standings, strict=True):
        write_line(_line(leftover, how))


@staged.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@all_option
@staging_option
@click.option("--to", "target", metavar="BUCKET/KEY", help="Store it under this name instead of its own.")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Write it to this new file, not to the store.")
@click.option("--force", is_flag=True, help="Replace other content that the name has by now.")
@click.option("--zeros", is_flag=True, help="Take zeros for bytes that are nowhere any more.")
@click.option("--keep", is_flag=True, help="Leave it in the staging folder, too.")
@json_option
@engine_options
@pass_target
def restore(
    where: Target,
    names: tuple[str, ...],
    everything: bool,
    staging: Path | None,
    target: str | None,
    path: Path | None,
    force: bool,
    zeros: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Put staged files into the store, durably, each under its own name; then they leave the staging folder.

    A NAME is what lake staged ls shows: BUCKET/KEY or id.  A name that has other content by now is left alone.
    """
    wanted = _wanted(_found(staging), names, everything)
    if target is not None and path is not None:
        raise InvalidArgument("--to and --file contradict each other; give one of them")
    if (target is not None or path is not None) and len(wanted) != 1:
        raise InvalidArgument(f"--to and --file take one staged file, not {len(wanted)}")
    from fuse.staging.leftovers import forget as forget_for_good

    def restored(leftover: Leftover) -> dict[str, Any]:
        if path is None:
            document = _to_store(lake, leftover, target, force, zeros)
        else:
            document = _to_file(where, leftover, path, zeros)
        if not keep:
            forget_for_good(leftover)
        return document

    # Without an engine they can be written into a file, except if part of their old content is needed.
    with where.open() if path is None else nullcontext() as lake:
        _each(wanted, restored, "restored", as_json)


@staged.command()
@click.argument("names", nargs=-1, metavar="[NAME...]")
@all_option
@staging_option
@json_option
def forget(names: tuple[str, ...], everything: bool, staging: Path | None, as_json: bool) -> None:
    """Remove staged files for good, by name or id."""
    from fuse.staging.leftovers import forget as forget_for_good

    def forgotten(leftover: Leftover) -> dict[str, Any]:
        forget_for_good(leftover)
        return {"id": leftover.id, "name": leftover.name}

    _each(_wanted(_found(staging), names, everything), forgotten, "forgotten", as_json)


# --- selection -------------------------------------------------------------------------------------------


def _found(staging: Path | None) -> list[Leftover]:
    """Return all staged files in the folders.  Raises LocalFileError for a given folder that cannot be read."""
    from cli.mount.places import staging_of_all
    from fuse.staging.leftovers import find_leftovers, staging_folders

    folders = [each for path in ([staging] if staging else staging_of_all()) for each in staging_folders(path)]
    return sorted(
        (leftover for folder in folders for leftover in find_leftovers(folder)), key=lambda leftover: leftover.time_ns
    )


def _wanted(found: list[Leftover], names: tuple[str, ...], everything: bool) -> list[Leftover]:
    """Return the chosen files.  Raises KeyNotFound; InvalidArgument if the choice is ambiguous."""
    from fuse.staging.leftovers import is_in_use
    from lakefs.names import SCHEME

    if everything == bool(names):
        raise InvalidArgument("say which staged files, by name or id, or --all; lake staged ls shows them")
    if everything:
        return [leftover for leftover in found if not is_in_use(leftover)]
    chosen: list[Leftover] = []
    for text in names:
        bare = text.removeprefix(SCHEME)
        matching = [leftover for leftover in found if bare in (leftover.id, leftover.name)]
        if not matching:
            raise KeyNotFound(f"nothing staged is called {text}; lake staged ls shows what there is", subject=text)
        if len(matching) > 1:
            ids = ", ".join(leftover.id for leftover in matching)
            raise InvalidArgument(f"{text} was staged {len(matching)} times; give an id: {ids}", subject=text)
        chosen += (leftover for leftover in matching if leftover not in chosen)
    return chosen


def _standings(where: Target, found: list[Leftover]) -> list[Standing]:
    from fuse.staging.leftovers import is_in_use
    from fuse.staging.restore import Standing, standing

    stored = _stored(where, [leftover.name for leftover in found])
    return [
        Standing.IN_USE if is_in_use(leftover) else standing(leftover, stored.get(leftover.name, _UNASKED))
        for leftover in found
    ]


_UNASKED = EngineUnreachable("the engine was not asked")


def _stored(where: Target, names: Iterable[str]) -> dict[str, Any]:
    """Return the store's answer for each name; nothing if no engine answers."""
    from lakefs.limits import BATCH_MAX
    from lakefs.names import parse_name

    asked = sorted({name for name in names if name})
    if not asked:
        return {}
    answers: list[Any] = []
    try:
        with where.open() as lake:
            driver = driver_of(lake)
            for start in range(0, len(asked), BATCH_MAX):
                batch = [parse_name(name) for name in asked[start : start + BATCH_MAX]]
                answers += driver.run(driver.steps.stat_many(batch))
    except LakeError as error:
        notice(f"lake: whether they can be restored is not known: {error.message}")
        return {}
    return dict(zip(asked, answers, strict=True))


# --- actions ---------------------------------------------------------------------------------------------


def _each(wanted: list[Leftover], act: Callable[[Leftover], dict[str, Any]], past: str, as_json: bool) -> None:
    """Act on one after the other, each claimed; the first failure is raised at the end."""
    done: list[dict[str, Any]] = []
    failures: list[LakeError] = []
    with _document_at_end(past, done, as_json):
        for leftover in wanted:
            try:
                done.append(_claimed(leftover, act))
            except LakeError as error:
                failures.append(error)
            else:
                if not as_json:
                    write_line(f"{past} {shown(str(done[-1]['name'] or leftover.id))}")
    for later in failures[1:]:
        notice(f"lake: {escaped(later.message)}")
    if failures:
        raise failures[0]


def _claimed(leftover: Leftover, act: Callable[[Leftover], dict[str, Any]]) -> dict[str, Any]:
    from fuse.staging.leftovers import claimed

    with claimed(leftover):
        return act(leftover)


@contextmanager
def _document_at_end(past: str, done: list[dict[str, Any]], as_json: bool) -> Iterator[None]:
    try:
        yield
    finally:
        if as_json:
            write_json({past: done})


def _to_store(lake: Lake | None, leftover: Leftover, target: str | None, force: bool, zeros: bool) -> dict[str, Any]:
    from fuse.staging.restore import restore_to_store
    from lakefs.names import parse_object_name

    assert lake is not None, "what goes to the store needs one"
    if target is None and not leftover.name:
        raise InvalidArgument(f"{leftover.id}: its name is lost; give one with --to, or a --file", subject=leftover.id)
    name = parse_object_name(target or leftover.name)
    if name.is_folder:
        raise InvalidArgument(f"{name} is a folder's name; give the full name of an object", subject=str(name))
    driver = driver_of(lake)
    stat = driver.run(restore_to_store(driver.steps, leftover, name, force=force, zeros=zeros))
    return {"id": leftover.id, "name": str(name), "size_bytes": stat.size_bytes, "etag": stat.etag}


def _to_file(where: Target, leftover: Leftover, path: Path, zeros: bool) -> dict[str, Any]:
    from fuse.staging.leftovers import restore as restore_to_file

    if leftover.is_complete:
        restore_to_file(leftover, path)
    else:
        with where.open() as lake, _base_reader(lake, leftover, zeros) as read_base:
            restore_to_file(leftover, path, read_base)
    return {"id": leftover.id, "name": leftover.name, "path": str(path), "size_bytes": leftover.size_bytes}


@contextmanager
def _base_reader(lake: Lake, leftover: Leftover, zeros: bool) -> Iterator[Callable[[int, int], bytes] | None]:
    """Yield a reader of the content that the leftover was written over; None for zeros."""
    from fuse.staging.restore import open_base
    from lakefs.get.objects import close_object, read_range

    driver = driver_of(lake)
    base = driver.run(open_base(driver.steps, leftover, zeros=zeros))
    if base is None:
        yield None
        return
    access = driver.steps.access(None)
    try:
        yield lambda offset, length: driver.run(read_range(access, base, offset, length))
    finally:
        driver.run(close_object(base))


# --- output ----------------------------------------------------------------------------------------------


def _document(leftover: Leftover, how: Standing) -> dict[str, Any]:
    return {
        "id": leftover.id,
        "name": leftover.name,
        "state": str(how),
        "size_bytes": leftover.size_bytes,
        "written_bytes": leftover.new_bytes,
        "written_at": iso_time(leftover.time_ns),
        "complete": leftover.is_complete,
        "path": str(leftover.path),
    }


def _line(leftover: Leftover, how: Standing) -> str:
    sizes = f"{human_bytes(leftover.new_bytes)} of {human_bytes(leftover.size_bytes)}"
    return f"{leftover.id:<22}  {sizes:>24}  {iso_time(leftover.time_ns)}  {how:<10}  {shown(leftover.name) or '-'}"
