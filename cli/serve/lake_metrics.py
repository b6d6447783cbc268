"""Metrics of a lake on several devices for the admin port's `/metrics`.  All are read from memory; nothing blocks."""

from __future__ import annotations

from functools import partial

from cli.serve.engine_metrics import dram_readings, scrub_readings, shared_index_readings
from engine.lake.lake_process import RunningLake
from engine.lake.parts import LakeNames, LakeParts
from engine.lake.shard_replicas import ShardReplicas
from engine.process.running import Running
from gateway.admin.metrics import Reading


def lake_readings(running: Running) -> list[Reading]:
    """Return the metrics of the process that serves the lake."""
    assert isinstance(running, RunningLake), "an engine has other metrics"
    parts = running.parts
    tier = parts.head.parts.tier
    return [
        Reading("lake_ready", "1 when the engine serves", lambda: running.not_ready() is None),
        Reading("lake_connections", "Open connections, of all heads of this machine", partial(_connections, running)),
        Reading("lake_members", "Members of this machine", lambda: len(parts.processes.all)),
        Reading(
            "lake_members_serving",
            "Members of this machine that serve",
            lambda: sum(member.is_serving for member in parts.processes.all),
        ),
        Reading(
            "lake_member_restarts_total",
            "Processes of members that ended and were started again",
            lambda: sum(member.restarts for member in parts.processes.all),
        ),
        Reading("lake_ring_epoch", "Number of the newest ring epoch", lambda: parts.links.tables[0].ring_epoch),
        Reading("lake_ring_epochs", "Ring epochs that are not retired", lambda: len(parts.links.tables)),
        Reading("lake_gc_generation", "Generation of gc", lambda: parts.links.generation),
        *scrub_readings(partial(_of_members, parts), "member"),
        *shared_index_readings(lambda: None if tier.shared_index is None else tier.shared_index.statistics()),
        *dram_readings(lambda: tier.dram),
        Reading("lake_buffers_in_use", "Payload buffers in use", lambda: parts.head.parts.buffers.in_use),
        *_readings_of_names(parts.names),
        *_readings_of_replicas(parts.replicas),
    ]


def _connections(running: RunningLake) -> float:
    return running.server.connection_count + (0 if running.heads is None else running.heads.connections())


def _of_members(parts: LakeParts, figure: str) -> dict[str, float]:
    """Return a figure of scrub of each member of this machine that serves, by its id."""
    serving = [member for member in parts.processes.all if member.member_id and figure in member.news.get("scrub", {})]
    return {member.member_id.hex(): member.news["scrub"][figure] for member in serving}


def _readings_of_names(names: LakeNames | None) -> list[Reading]:
    if names is None:
        return []
    metadata = names.local.store.metadata
    return [
        Reading(
            "lake_durable_sequence", "Last durable journal group", lambda: float(metadata.stats()["durable_sequence"])
        )
    ]


def _readings_of_replicas(replicas: ShardReplicas | None) -> list[Reading]:
    if replicas is None:
        return []
    return [
        Reading(
            "lake_names_leads",
            "1 when this machine's replica of a names shard leads",
            lambda: {str(shard): float(replica.leads) for shard, replica in replicas.all.items()},
            label="shard",
        ),
        Reading(
            "lake_names_kept_sequence",
            "Last group of a names shard in the journal of this machine's replica; 0 when it has none open",
            lambda: {str(shard): float(replica.kept_sequence) for shard, replica in replicas.all.items()},
            label="shard",
        ),
    ]
