"""Models of the cluster's rules with their bounds, and the weakened rules that each of them notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tests.models import (
    copies,
    generations,
    group_log,
    head_stamps,
    leases,
    mirrored_disks,
    moves,
    names_shards,
    stripes,
)
from tests.models.copies import Copies
from tests.models.explore import Model
from tests.models.generations import Generations
from tests.models.group_log import GroupLog
from tests.models.head_stamps import HeadStamps
from tests.models.leases import Leases
from tests.models.mirrored_disks import Mirrors
from tests.models.moves import CHANGING, NOTHING, NOW, Moves
from tests.models.names_shards import NamesShards
from tests.models.stripes import Stripes


class Case(NamedTuple):
    """A model with its bounds, its number of states, and words of steps that it must have taken."""

    make: Callable[[], Model[Any]]
    states: int
    happens: tuple[str, ...] = ()


_GC: Final = ("shard is freed", "restart", "names restart", "removed")
_MOVED: Final = (*_GC, "drop is refused", "drops the shard", "walker dies")
_SHARDED: Final = (
    "is freed",
    "SessionLost",
    "is added",
    "2 shards are counted",
    "another leads shard 1",
    "the walk ends",
    "removal in shard 1 is in the log",
)
_MIRRORED: Final = (
    "is answered",
    "while a list is written",
    "thrown out",
    "a process opens",
    "killed",
    "forgets its list",
)
_REPLACED: Final = (*_MIRRORED, "replaced by an empty one", "a copy is made")
_HEALED: Final = ("rebuilds", "clears the slot", "noted anew", "a home is away", "replaced by an empty one")
_LOGGED: Final = (
    "takes the leader's key",
    "the leader's key is gone",
    "and a leftover",
    "removal 0",
    "of 2 parts",
    "is answered",
    "loses its power",
    "restarts",
    "is trimmed",
)
_REPEATED: Final = (
    "a turn is sent",
    "another's read",
    "visible",
    "kept alive",
    "next leader changes",
    "head joins",
    "finds the stamp",
    "a right for 0 ticks",
    "clock loses",
    "is killed, its restart",
)

SMALL: Final = {
    "generations": Case(lambda: Generations(3), 54_599, (*_GC, "SessionLost")),
    "moves from a substitute": Case(lambda: Moves(3), 44_175, _MOVED),
    "copies": Case(lambda: Copies(3), 3_180, (*_GC, "copied", "renamed", "again")),
    "names shards": Case(lambda: NamesShards(3), 12_825, _SHARDED),
    "mirrors on 2 devices, m = 1": Case(lambda: Mirrors(2, 1, 2), 608, _REPLACED),
    "mirrors on 2 devices, m = 2": Case(lambda: Mirrors(2, 2, 2), 608, _REPLACED),
    "mirrors on 3 devices, m = 1": Case(lambda: Mirrors(3, 1, 1), 6_246, _REPLACED),
    "mirrors on 3 devices, m = 2": Case(lambda: Mirrors(3, 2, 1), 12_782, _REPLACED),
    "stripes 1+1": Case(lambda: Stripes(1, 1, goings=3), 18_942, _HEALED),
    "stripes 2+1": Case(lambda: Stripes(2, 1, goings=1), 8_718, _HEALED),
    "stripes 1+2": Case(lambda: Stripes(1, 2, goings=1), 12_770, (*_HEALED, "fewer shards")),
    "log of groups": Case(lambda: GroupLog(2, losses=0), 39_794, _LOGGED),
    "log of groups, a disk lost": Case(lambda: GroupLog(3, groups=1), 19_015, (*_LOGGED, "begins anew", "too old")),
    "leases": Case(lambda: Leases(2, groups=2, leaders=3), 25_454, ("loses", "lease is lost", "follows")),
    "stamps at a head": Case(lambda: HeadStamps(1, messages=3), 56_071, _REPEATED),
}
"""In `make test`."""

LARGE: Final = {
    "moves between epochs": Case(lambda: Moves(3, **CHANGING), 156_481, _MOVED),
    "copies, 5 nodes, 5 generations": Case(lambda: Copies(5, nodes=5), 58_424),
    "names shards, 5 generations": Case(lambda: NamesShards(5), 92_426, _SHARDED),
    "stripes 2+1, 2 go": Case(lambda: Stripes(2, 1, goings=2), 153_140),
    "stripes 1+2, 2 go": Case(lambda: Stripes(1, 2, goings=2), 228_814),
    "mirrors on 3 devices, m = 1, 2 replaced": Case(lambda: Mirrors(3, 1, 2), 12_351, _REPLACED),
    "mirrors on 3 devices, m = 2, 2 replaced": Case(lambda: Mirrors(3, 2, 2), 29_077, _REPLACED),
    "log of groups, 2 groups, a disk lost": Case(lambda: GroupLog(2), 110_507, (*_LOGGED, "begins anew")),
    "leases of 3 ticks, 4 leaders": Case(lambda: Leases(3, groups=3, leaders=4), 202_291),
    "stamps at a head, 2 changes": Case(lambda: HeadStamps(2), 201_979, _REPEATED),
    "stamps at a head, a lease of 3 ticks": Case(lambda: HeadStamps(1, lease=3, messages=3), 154_599, _REPEATED),
}
"""In `make test-all`."""

LARGEST: Final = {
    "generations, 4": Case(lambda: Generations(4), 371_536),
    "moves from a substitute, 4 generations": Case(lambda: Moves(4), 256_834),
    "mirrors on 4 devices, m = 2, none replaced": Case(lambda: Mirrors(4, 2, 0), 116_740, _MIRRORED),
    "moves from a substitute, 2 writers": Case(lambda: Moves(3, writers=2), 606_367),
    "log of groups, 3 leaders": Case(lambda: GroupLog(2, leaders=3), 391_516, _LOGGED),
    "log of groups, 3 replicas": Case(lambda: GroupLog(3, losses=0), 488_718, _LOGGED),
    "stamps at a head, 3 changes": Case(lambda: HeadStamps(3), 767_276, _REPEATED),
    "stamps at a head, 2 changes, a lease of 3 ticks": Case(
        lambda: HeadStamps(2, lease=3, messages=3), 925_699, _REPEATED
    ),
}
"""In `make torture`."""

RULES: Final[dict[str, type[Any]]] = {
    "generations": generations.Rules,
    "moves": moves.Rules,
    "copies": copies.Rules,
    "names shards": names_shards.Rules,
    "mirrors": mirrored_disks.Rules,
    "stripes": stripes.Rules,
    "log": group_log.Rules,
    "leases": leases.Rules,
    "stamps": head_stamps.Rules,
}


def _generations(**rules: Any) -> Model[Any]:
    return Generations(3, generations.Rules(**rules))


def _steady(**rules: Any) -> Model[Any]:
    return Moves(3, moves.Rules(**rules))


def _changing(**rules: Any) -> Model[Any]:
    return Moves(3, moves.Rules(**rules), **CHANGING)


def _copies(**rules: Any) -> Model[Any]:
    return Copies(3, copies.Rules(**rules))


def _shards(**rules: Any) -> Model[Any]:
    return NamesShards(3, names_shards.Rules(**rules))


def _mirrors(devices: int, blanks: int, *, stale_only: bool = True, **rules: Any) -> Model[Any]:
    return Mirrors(devices, devices - 1, blanks, mirrored_disks.Rules(**rules), stale_only=stale_only)


def _stripes(m: int, goings: int, **rules: Any) -> Model[Any]:
    return Stripes(1, m, stripes.Rules(**rules), goings=goings)


def _log(replicas: int = 2, groups: int = 2, losses: int = 0, **rules: Any) -> Model[Any]:
    return GroupLog(replicas, group_log.Rules(**rules), groups=groups, losses=losses)


def _leases(**rules: Any) -> Model[Any]:
    return Leases(2, leases.Rules(**rules))


def _stamps(**rules: Any) -> Model[Any]:
    return HeadStamps(1, head_stamps.Rules(**rules))


WEAKENED: Final[dict[tuple[str, str], Callable[[], Model[Any]]]] = {
    ("generations", "sweeps_below"): lambda: _generations(sweeps_below=0),
    ("generations", "walk_waits_for_names"): lambda: _generations(walk_waits_for_names=False),
    ("generations", "walk_waits_for_members"): lambda: _generations(walk_waits_for_members=False),
    ("generations", "restart_counts_as_touched"): lambda: _generations(restart_counts_as_touched=False),
    ("generations", "names_refuse_old_sessions"): lambda: _generations(names_refuse_old_sessions=False),
    ("generations", "sweep_wants_all_marks"): lambda: _generations(sweep_wants_all_marks=False),
    ("moves", "drop_compares"): lambda: _steady(drop_compares=False),
    ("moves", "lost_copy_is_stored_again"): lambda: _steady(lost_copy_is_stored_again=False),
    ("moves", "copy_keeps_its_generation"): lambda: _steady(copy_keeps_its_generation=False),
    ("moves", "sweep_spares_new_births"): lambda: _steady(sweep_spares_new_births=False),
    ("moves", "sweep_compares"): lambda: _changing(sweep_compares=NOTHING),
    ("moves", "sweep_compares with now only"): lambda: _changing(sweep_compares=NOW),
    ("moves", "members_refuse_old_epochs"): lambda: _changing(members_refuse_old_epochs=False),
    ("moves", "retirement_waits_for_the_walker"): lambda: _changing(retirement_waits_for_the_walker=False),
    ("copies", "notes_copies"): lambda: _copies(notes_copies=False),
    ("copies", "walk_ends_when_nothing_is_noted"): lambda: _copies(walk_ends_when_nothing_is_noted=False),
    ("copies", "new_names_walk_anew"): lambda: _copies(new_names_walk_anew=False),
    ("names shards", "all_shards_join"): lambda: _shards(all_shards_join=False),
    ("names shards", "all_shards_are_walked"): lambda: _shards(all_shards_are_walked=False),
    ("names shards", "shards_are_counted_behind_the_generation"): lambda: _shards(
        shards_are_counted_behind_the_generation=False
    ),
    ("names shards", "new_shards_begin_joined"): lambda: _shards(new_shards_begin_joined=False),
    ("names shards", "copies_across_are_offered"): lambda: _shards(copies_across_are_offered=False),
    ("names shards", "reads_check_the_leader"): lambda: _shards(reads_check_the_leader=False),
    ("names shards", "walks_end_with_the_term"): lambda: _shards(walks_end_with_the_term=False),
    ("names shards", "walks_are_whole_when_durable"): lambda: _shards(walks_are_whole_when_durable=False),
    ("mirrors", "contradicted_lists_do_not_count"): lambda: _mirrors(3, 1, contradicted_lists_do_not_count=False),
    ("mirrors", "opening_wants_more_than_half"): lambda: _mirrors(2, 1, opening_wants_more_than_half=False),
    ("mirrors", "opening_syncs_what_it_reads"): lambda: _mirrors(2, 1, opening_syncs_what_it_reads=False),
    ("mirrors", "opening_settles_the_list"): lambda: _mirrors(3, 0, opening_settles_the_list=False),
    ("mirrors", "settled_on_more_than_half"): lambda: _mirrors(3, 1, settled_on_more_than_half=False),
    ("mirrors", "at_most_half_is_left_out"): lambda: _mirrors(3, 0, at_most_half_is_left_out=False),
    ("mirrors", "unfinished_lists_count_too"): lambda: _mirrors(3, 1, unfinished_lists_count_too=False),
    ("mirrors", "list_is_durable_first"): lambda: _mirrors(2, 1, list_is_durable_first=False),
    ("mirrors", "changes_reach_all_copies"): lambda: _mirrors(2, 1, changes_reach_all_copies=False),
    ("mirrors", "failure_of_a_new_copy_waits"): lambda: _mirrors(2, 1, failure_of_a_new_copy_waits=False),
    ("mirrors", "only_lists_that_count_replace_others"): lambda: _mirrors(
        2, 0, stale_only=False, only_lists_that_count_replace_others=False
    ),
    ("mirrors", "contradicted_lists_do_not_count, so all open"): lambda: _mirrors(
        3, 0, stale_only=False, contradicted_lists_do_not_count=False
    ),
    ("stripes", "notes_before_the_answer"): lambda: _stripes(2, 1, notes_before_the_answer=False),
    ("stripes", "notes_behind_the_stores"): lambda: _stripes(2, 1, notes_behind_the_stores=False),
    ("stripes", "notes_strays"): lambda: _stripes(1, 3, notes_strays=False),
    ("stripes", "short_answer_leaves_one"): lambda: _stripes(2, 1, short_answer_leaves_one=False),
    ("stripes", "short_answer_counts_members"): lambda: _stripes(2, 2, short_answer_counts_members=False),
    ("stripes", "answer_counts_members_that_are_up"): lambda: _stripes(2, 1, answer_counts_members_that_are_up=False),
    ("stripes", "returning_members_are_noted"): lambda: _stripes(2, 1, returning_members_are_noted=False),
    ("stripes", "clear_compares"): lambda: _stripes(2, 1, clear_compares=False),
    ("stripes", "clear_wants_all_homes"): lambda: _stripes(2, 1, clear_wants_all_homes=False),
    ("log", "append_compares_the_leader"): lambda: _log(append_compares_the_leader=False),
    ("log", "parts_go_in_order"): lambda: _log(parts_go_in_order=False),
    ("log", "last_part_is_acknowledged"): lambda: _log(last_part_is_acknowledged=False),
    ("log", "taken_is_done_with_equal_bytes"): lambda: _log(taken_is_done_with_equal_bytes=False),
    ("log", "part_is_no_group"): lambda: _log(part_is_no_group=False),
    ("log", "key_comes_before_the_reading"): lambda: _log(key_comes_before_the_reading=False),
    ("log", "leader_reads_to_the_end"): lambda: _log(leader_reads_to_the_end=False),
    ("log", "reading_begins_at_its_own_end"): lambda: _log(reading_begins_at_its_own_end=False),
    ("log", "leftovers_are_removed"): lambda: _log(leftovers_are_removed=False),
    ("log", "removal_compares_the_part"): lambda: _log(removal_compares_the_part=False),
    ("log", "journal_follows_the_log"): lambda: _log(journal_follows_the_log=False),
    ("log", "trimmed_behind_two"): lambda: _log(trimmed_behind_two=False),
    ("log", "trimmed_behind_syncs"): lambda: _log(trimmed_behind_syncs=False),
    ("log", "old_replicas_do_not_lead"): lambda: _log(3, 1, old_replicas_do_not_lead=False),
    ("log", "trimming_is_recorded"): lambda: _log(3, 1, trimming_is_recorded=False),
    ("log", "only_groups_behind_the_trimmed_are_taken"): lambda: _log(
        3, 1, only_groups_behind_the_trimmed_are_taken=False
    ),
    ("log", "trimming_compares_the_records"): lambda: _log(3, 1, 1, trimming_compares_the_records=False),
    ("log", "new_replicas_say_so_first"): lambda: _log(2, 1, 1, new_replicas_say_so_first=False),
    ("leases", "reads_are_under_the_lease"): lambda: _leases(reads_are_under_the_lease=False),
    ("leases", "lease_counts_from_the_sending"): lambda: _leases(lease_counts_from_the_sending=False),
    ("leases", "a_second_is_left"): lambda: _leases(a_second_is_left=False),
    ("leases", "clocks_count_while_suspended"): lambda: _leases(clocks_count_while_suspended=False),
    ("leases", "lost_leases_are_not_renewed"): lambda: _leases(lost_leases_are_not_renewed=False),
    ("leases", "followers_do_not_read"): lambda: _leases(followers_do_not_read=False),
    ("stamps", "changes_wait_for_heads"): lambda: _stamps(changes_wait_for_heads=False),
    ("stamps", "reads_wait_for_heads"): lambda: _stamps(reads_wait_for_heads=False),
    ("stamps", "rights_end_with_the_lease"): lambda: _stamps(rights_end_with_the_lease=False),
    ("stamps", "rights_are_given_under_the_lease"): lambda: _stamps(rights_are_given_under_the_lease=False),
    ("stamps", "rights_count_from_the_sending"): lambda: _stamps(rights_count_from_the_sending=False),
    ("stamps", "rights_end_before_the_lease"): lambda: _stamps(rights_end_before_the_lease=False),
    ("stamps", "rights_end_before_their_record"): lambda: _stamps(rights_end_before_their_record=False),
    ("stamps", "clocks_count_while_suspended"): lambda: _stamps(clocks_count_while_suspended=False),
    ("stamps", "said_behind_the_turn"): lambda: _stamps(said_behind_the_turn=False),
    ("stamps", "end_is_loaded_first"): lambda: _stamps(end_is_loaded_first=False),
    ("stamps", "taught_behind_durable"): lambda: _stamps(taught_behind_durable=False),
    ("stamps", "noted_when_read"): lambda: _stamps(noted_when_read=False),
    ("stamps", "rights_stay_behind_turns"): lambda: _stamps(rights_stay_behind_turns=False),
    ("stamps", "ends_are_kept_before_rights_are_given"): lambda: _stamps(ends_are_kept_before_rights_are_given=False),
    ("stamps", "restarts_wait_for_the_kept_end"): lambda: _stamps(restarts_wait_for_the_kept_end=False),
    ("stamps", "joining_ends_what_clients_keep"): lambda: _stamps(joining_ends_what_clients_keep=False),
}
"""Each rule, weakened in the smallest model that notices it."""

SPARE: Final[dict[tuple[str, str], Callable[[], Model[Any]]]] = {
    ("copies", "notes_commits"): lambda: _copies(notes_commits=False),
    ("moves", "sweep_compares, behind the change"): lambda: _steady(sweep_compares=NOTHING),
    ("log", "append_compares_the_part"): lambda: _log(append_compares_the_part=False),
}
"""Rules without which a model holds: `touched` protects what a session commits, every row has its marks, and one leader
puts one group at a sequence."""
