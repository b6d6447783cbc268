"""`lake cluster`: the machines and members of a lake on several devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.operate.rescue import rescue
from cli.terminal.output import json_option, notice, write_json, write_line
from cli.terminal.target import Target, engine_options, pass_target
from lakefs.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from engine.lake.etcd_place import EtcdPlace
    from lakefs.client.blocking.lake import Lake
    from lakefs.config.settings import Config


@click.group()
@engine_options
def cluster() -> None:
    """Show, add, drain and remove members of a lake on several devices, and join machines to one.

    MEMBER is the beginning of its id, as lake cluster status shows it, or its folder on this machine.  init, join and
    add write into this machine's data folders, and are run as the user of lake serve, or as root.
    """


cluster.add_command(rescue)


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a machine's place in the lake, and of its folders."""
    for option in (
        click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml."),
        click.option("--zone", default="", metavar="NAME", help="The zone that the rack is in."),
        click.option("--rack", default="", metavar="NAME", help="The rack that the machine is in."),
        click.option("--data", metavar="DIR", multiple=True, help="A folder on each device; else the settings' ones."),
        click.option(
            "--listen", required=True, metavar="HOST:PORT", help="Where other machines find this one; members count up."
        ),
    ):
        command = option(command)
    return command


def etcd_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the lake's etcd; the command gets the place that they say, as `etcd`, None without any."""
    options = (
        click.option("--etcd-key", default="", metavar="FILE", help="The key of that certificate, PEM."),
        click.option("--etcd-cert", default="", metavar="FILE", help="The lake's certificate for etcd, PEM."),
        click.option("--etcd-ca", default="", metavar="FILE", help="Who signed etcd's certificates, PEM."),
        click.option("--etcd-password-file", default="", metavar="FILE", help="The password of that user, mode 0600."),
        click.option("--etcd-user", default="", metavar="NAME", help="The lake's user at etcd."),
        click.option("--etcd", default="", metavar="URL,URL,URL", help="The etcd that coordinates the lake."),
    )

    @wraps(command)
    def with_etcd(
        etcd: str, etcd_user: str, etcd_password_file: str, etcd_ca: str, etcd_cert: str, etcd_key: str, **rest: Any
    ) -> Any:
        from engine.lake.etcd_place import place_of

        name = rest.pop("etcd_name", "")
        files = {"password_file": etcd_password_file, "ca": etcd_ca, "certificate": etcd_cert, "key": etcd_key}
        if not etcd and any((name, etcd_user, *files.values())):
            raise InvalidArgument("these are options of an etcd: give its URLs, with --etcd")
        place = place_of(etcd, name, user=etcd_user, **files) if etcd else None
        return command(etcd=place, **rest)

    wrapped: Callable[..., Any] = with_etcd
    for option in options:
        wrapped = option(wrapped)
    return wrapped


@cluster.command()
@click.argument("name")
@place_options
@etcd_options
@click.option("--etcd-name", default="", metavar="NAME", help="The lake's name at etcd; else its id.")
@click.option("--no-etcd", is_flag=True, help="Let a lake that has an etcd be without one again.")
@click.option("--protect", default="", metavar="K+M", help="Data and parity shards of a new lake; 4+2, chosen once.")
@click.option("--accept-loss", is_flag=True, help="Make a lake although the loss of one device would harm it.")
def init(
    name: str,
    listen: str,
    data: tuple[str, ...],
    rack: str,
    zone: str,
    file: str | None,
    protect: str,
    accept_loss: bool,
    etcd: EtcdPlace | None,
    no_etcd: bool,
) -> None:
    """Make a lake of several machines in this one's folders, or open the lake in them to other machines.

    Names will be on this machine.  It listens from the next start of lake serve on; and then the lake moves to an etcd
    that is given, or back.
    """
    from engine.lake.joining import Place, open_to_machines
    from engine.superblock.secret_files import CLUSTER_TOKEN_FILE

    folders, settings = _folders(data, file)
    protect = protect or (settings.protect if settings.origins["protect"] != "default" else "")
    if etcd is not None and no_etcd:
        raise InvalidArgument("give --etcd or --no-etcd")
    place = Place(listen, rack, zone, etcd, no_etcd)
    open_to_machines(folders, name, place, protect=protect, accept_loss=accept_loss, check_etcd=_check_etcd)
    notice(f"lake: {name} listens at {listen} from the next start of lake serve on")
    notice(
        f"lake: copy {folders[0] / CLUSTER_TOKEN_FILE} to each other machine, readable by its owner alone, and there:"
    )
    notice(f"lake: lake cluster join {listen} --token-file FILE --listen HOST:PORT --data DIR")


@cluster.command()
@click.argument("names_at", metavar="HOST:PORT")
@click.option(
    "--token-file", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The lake's cluster.token."
)
@place_options
@etcd_options
def join(
    names_at: str,
    token_file: Path,
    listen: str,
    data: tuple[str, ...],
    rack: str,
    zone: str,
    file: str | None,
    etcd: EtcdPlace | None,
) -> None:
    """Let this machine's folders become members of the lake whose names listen at HOST:PORT.

    They are members from the next start of lake serve on, with these folders as its data.  Where the lake has an etcd,
    this machine takes its URLs and files' paths from the one that it joins; --etcd gives others.
    """
    from cli.terminal.process import run_loop
    from engine.lake.joining import Place, join as joined

    folders, _ = _folders(data, file)
    token = _token(token_file)
    record = run_loop(partial(joined, folders, names_at, token, Place(listen, rack, zone, etcd)))
    notice(f"lake: this machine joins the lake {record.name or record.lake} with the next start of lake serve")


@cluster.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--config", "file", metavar="FILE", help="Instead of /etc/lake/lake.toml.")
@click.option("--data", metavar="DIR", multiple=True, help="The folders in use; else those of the settings.")
def add(folder: Path, data: tuple[str, ...], file: str | None) -> None:
    """Let an empty folder on this machine become a member.

    If lake serve has it among its data, it is one within seconds; else with the next start that has.
    """
    _add(folder, _folders(data, file)[0])


@cluster.command()
@click.argument("member")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--accept-loss", is_flag=True, help="Also when there is no room for all that is made anew.")
@engine_options
@pass_target
def replace(where: Target, member: str, folder: Path, accept_loss: bool) -> None:
    """Let an empty folder on this machine become a member in place of one whose device is lost.

    It is add and remove --accept-loss: what the lost one had is made from the other shards.  Safe to repeat.
    """
    from cli.operate.replacing import check_room, smaller_by

    with where.open() as lake:
        found = _member_of(lake, member)
        status, served = _lake_of(lake)
        if not accept_loss:
            check_room(folder, status["members"], found)
        _add(folder, [Path(each["folder"]) for each in served], replaces=found)
        _remove(lake, found, accept_loss=True)
    notice(f"lake: member {found} was removed")
    if smaller := smaller_by(folder, status["members"], found):
        notice(f"lake: {smaller}")


@cluster.command()
@json_option
@engine_options
@pass_target
def status(where: Target, as_json: bool) -> None:
    """Show each member, the losses that the lake outlives, and how far healing is."""
    from cli.operate.lake_lines import lake_lines

    with where.open() as lake:
        found, folders = _lake_of(lake)
    if as_json:
        write_json({**found, "folders": folders})
        return
    for line in lake_lines(found, folders):
        write_line(line)


@cluster.command()
@click.argument("member")
@engine_options
@pass_target
def drain(where: Target, member: str) -> None:
    """Let other members take a member's places, and move its shards to them.  Safe to repeat.

    Returns at once; lake cluster status shows how far it is.  When nothing is left in it, remove it.
    """
    from lakefs.client.facade import driver_of
    from lakefs.wire.messages import MEMBER_DRAIN

    with where.open() as lake:
        found = _member_of(lake, member)
        driver = driver_of(lake)
        driver.run(driver.steps.change_member(bytes.fromhex(found), MEMBER_DRAIN))
    notice(f"lake: member {found} is drained: its shards move to others; see how far with: lake cluster status")


@cluster.command()
@click.argument("member")
@click.option("--accept-loss", is_flag=True, help="Its device is lost: what it had is made from the other shards.")
@engine_options
@pass_target
def remove(where: Target, member: str, accept_loss: bool) -> None:
    """Remove a member for ever: one that was drained and holds nothing, or whose device is lost.  Safe to repeat."""
    with where.open() as lake:
        found = _member_of(lake, member)
        _remove(lake, found, accept_loss=accept_loss)
    notice(f"lake: member {found} was removed; its folder is not used any more")


@cluster.command(name="set")
@click.argument("settings", metavar="NAME=VALUE...", nargs=-1, required=True)
@engine_options
@pass_target
def set_(where: Target, settings: tuple[str, ...]) -> None:
    """Change settings of the whole lake; lake cluster status shows them.

    out-after=TIME: silence after which a member is out, and others get its places; at first 10m, at least 1m.
    out-stops=machine|rack|zone|off: none is made out while more are away at once than the largest machine, rack or zone
    has, as then it is the network; at first rack.
    """
    from lakefs.client.facade import driver_of
    from lakefs.config.values import parse_duration

    known: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "out-after":
            known["out_after_s"] = int(parse_duration(f"{value}s" if value.isdecimal() else value)) or -1
        elif name == "out-stops":
            known["out_stops"] = value or "?"
        else:
            raise InvalidArgument(f"{name!r} is no setting of a lake; there are out-after and out-stops", subject=name)
    with where.open() as lake:
        _lake_of(lake)
        driver = driver_of(lake)
        driver.run(driver.steps.set_lake(**known))
    notice("lake: set; lake cluster status shows it")


@cluster.group(invoke_without_command=True)
@json_option
@engine_options
@pass_target
@click.pass_context
def names(context: click.Context, where: Target, as_json: bool) -> None:
    """Show the replicas of the names, in a lake with etcd: which one leads, and how far behind the others are.

    Where the names are in several shards, the lines of each begin with its number.
    """
    if context.invoked_subcommand is not None:
        return
    from cli.operate.lake_lines import replica_lines

    with where.open() as lake:
        found, _ = _lake_of(lake)
    _replicas(found)
    if as_json:
        shown = ("replicas", "tail", "outlives_machines", "shards")
        write_json({name: found["names"][name] for name in shown if name in found["names"]})
        return
    for line in replica_lines(found):
        write_line(line)


@names.command(name="add")
@engine_options
@pass_target
def add_shard(where: Target) -> None:
    """Add a names shard: new buckets go to the shard that has the fewest, with a log and replicas of its own.

    Waits until a machine serves it.  The number of shards never falls, and is 16 at most.
    """
    from lakefs.client.facade import driver_of

    with where.open() as lake:
        _replicas(_lake_of(lake)[0])
        driver = driver_of(lake)
        added = driver.run(driver.steps.add_names_shard())
    shard, machine = added["shard"], added["machine"]
    if not machine:
        notice(f"lake: names shard {shard} was added, and no machine serves it yet; see: lake cluster names")
        return
    notice(f"lake: names shard {shard} is served by machine {machine}; new buckets go to the shard that has the fewest")


@names.command(name="remove")
@click.argument("replica")
@engine_options
@pass_target
def remove_replica(where: Target, replica: str) -> None:
    """Remove a replica of the names whose machine is gone for ever.  Safe to repeat.

    REPLICA is the beginning of its id, as lake cluster names shows it.  The one that leads is not removed.  A machine
    without a replica makes one, if fewer than three are left.
    """
    from lakefs.client.facade import driver_of
    from lakefs.wire.messages import NAMES_REMOVE

    with where.open() as lake:
        found = _replica_of(lake, replica)
        driver = driver_of(lake)
        driver.run(driver.steps.change_member(bytes.fromhex(found), NAMES_REMOVE))
    notice(f"lake: replica {found} of the names was removed, and does not come back")


def _replica_of(lake: Lake, text: str) -> str:
    """Return the id of the replica that a text names, in hex.  InvalidArgument unless there is exactly one."""
    found, _ = _lake_of(lake)
    others = [each for shard in found["names"].get("shards", ()) for each in shard["replicas"]]
    named = [each["id"] for each in (*_replicas(found), *others) if text and each["id"].startswith(text.lower())]
    if len(named) != 1:
        many = "several replicas" if named else "no replica"
        raise InvalidArgument(f"{text!r} names {many}; see them with: lake cluster names", subject=text)
    return str(named[0])


def _replicas(lake: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replicas in a lake's status.  InvalidArgument where names have none."""
    replicas: list[dict[str, Any]] | None = lake.get("names", {}).get("replicas")
    if replicas is None:
        raise InvalidArgument(lake.get("reason") or "the names of a lake without etcd have no replicas")
    return replicas


def _remove(lake: Lake, member: str, *, accept_loss: bool) -> None:
    """Remove a member."""
    from lakefs.client.facade import driver_of
    from lakefs.wire.messages import MEMBER_REMOVE

    driver = driver_of(lake)
    driver.run(driver.steps.change_member(bytes.fromhex(member), MEMBER_REMOVE, accept_loss=accept_loss))


def _add(folder: Path, folders: list[Path], *, replaces: str = "") -> None:
    """Let a folder become a member of the lake in others of this machine; in place of another one, if it is given."""
    from engine.lake.joining import add_folder

    add_folder(folders, folder.absolute(), replaces=replaces)
    if folder.absolute() in folders:
        notice(f"lake: {folder} becomes a member; see it with: lake cluster status")
    else:
        notice(f"lake: {folder} becomes a member with the next start of lake serve that has it among its data")


def _check_etcd(place: EtcdPlace, lake: bytes) -> None:
    """Refuse an etcd that cannot be reached with what was given, or has another lake of that name."""
    from cli.terminal.process import run_loop
    from engine.lake.lake_etcd import check_etcd

    run_loop(partial(check_etcd, place, lake))


def _folders(data: tuple[str, ...], file: str | None) -> tuple[list[Path], Config]:
    """Return this machine's data folders, and its settings.  ConfigError."""
    from lakefs.config.settings import load

    settings = load(file=file, flags={"data": data})
    return list(settings.folders), settings


def _token(file: Path) -> str:
    """Return the lake's token.  LocalFileError if the file cannot be read, ConfigError if others may read it."""
    text = Target(token_file=file).token()
    assert text is not None, "the file was given"
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} is open to others; run: chmod 600 {file}", subject=str(file))
    return text


def _lake_of(lake: Lake) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the lake's part of the status, and its folders on this machine.  InvalidArgument for one engine."""
    status = lake.status()
    if "lake" not in status:
        raise InvalidArgument("this is one engine on one device, and has no members")
    return status["lake"], status.get("folders", [])


def _member_of(lake: Lake, text: str) -> str:
    """Return the id of the member that a text names, in hex.  InvalidArgument unless there is exactly one."""
    found, folders = _lake_of(lake)
    places = {each["folder"].rstrip("/"): each["member"] for each in folders if each["member"]}
    if text.rstrip("/") in places:
        return str(places[text.rstrip("/")])
    known = [*[member["id"] for member in found.get("members", ())], *found.get("removed", ())]
    named = [each for each in known if text and each.startswith(text.lower())]
    if len(named) != 1:
        many = "several members" if named else "no member"
        raise InvalidArgument(f"{text!r} names {many}; see them with: lake cluster status", subject=text)
    return str(named[0])
