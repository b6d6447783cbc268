"""The name of vLLM's space, with stand-ins for vLLM's configuration: another value of a field is another space."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

import pytest

from lakefs.limits import SPACE_NAME_BYTES_MAX
from lakefs.plugins.kv.model_files import Model
from lakefs.plugins.kv.vllm_space import NOT_IN_NAME, NOT_IN_ONE_LAYOUT, space_of, unseen_by


@dataclass(frozen=True)
class Group:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("l0", "l1")
    group_id: int = 0
    sliding_window_size_in_chunks: int | None = None


@dataclass(frozen=True)
class Named:
    name: str = "/models/llama"
    dtype: str = "bfloat16"
    max_model_len: int = 4096


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 0
    data_parallel_size: int = 1
    data_parallel_rank_local: int | None = None
    is_parallelism_agnostic: bool = False


@dataclass(frozen=True)
class Config:
    groups: tuple[Group, ...] = (Group(),)
    worker_kv_bytes_per_block: int = 65536
    enable_kv_cache_events: bool = False
    extra_config: dict[str, Any] = field(default_factory=lambda: {"cpu_bytes_to_use": 1 << 30})
    engine_id: str = "e"
    model: Named = field(default_factory=Named)
    cache: Cache = field(default_factory=Cache)
    parallel: Parallel = field(default_factory=Parallel)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = None


MODEL = Model("content 00", "llama")


def name_of(config: Any, model: Model = MODEL, row_bytes: int = 131072, **more: str) -> str:
    chosen = {"release": "0.33.0", "platform": "cuda", "salt": ""} | more
    return space_of(config, model, row_bytes, **chosen)


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return {str: "another", type(None): 7, tuple: ("another",), dict: {"an_option": 1}}[type(value)]


def changed(config: Any) -> list[tuple[str, Any]]:
    """Return the configuration with another value in each of its fields, by the field's path."""
    found = []
    for known in fields(config):
        value = getattr(config, known.name)
        if known.name == "groups":
            for path, group in changed(value[0]):
                found.append((f"groups.{path}", replace(config, groups=(group,))))
        elif hasattr(value, "__dataclass_fields__"):
            for path, part in changed(value):
                found.append((f"{known.name}.{path}", replace(config, **{known.name: part})))
        else:
            found.append((known.name, replace(config, **{known.name: other(value)})))
    return found


CHANGED = dict(changed(Config()))


@pytest.mark.parametrize("path", CHANGED)
def test_another_value_of_a_field_is_another_space_unless_it_is_listed(path: str) -> None:
    is_same = name_of(CHANGED[path]) == name_of(Config())
    assert is_same == (path in NOT_IN_NAME and path != "parallel.rank")


@pytest.mark.parametrize("path", CHANGED)
def test_engines_of_every_layout_share_blocks_that_are_the_same_in_each(path: str) -> None:
    agnostic = replace(Config(), parallel=replace(Parallel(), is_parallelism_agnostic=True))
    is_same = name_of(dict(changed(agnostic))[path]) == name_of(agnostic)
    assert is_same == (path in NOT_IN_NAME or path in NOT_IN_ONE_LAYOUT)


def test_what_is_beside_the_configuration_counts_too() -> None:
    names = [
        name_of(Config()),
        name_of(Config(), Model("content 01", "llama")),
        name_of(Config(), Model("name llama", "llama")),
        name_of(Config(), row_bytes=131073),
        name_of(Config(), salt="a"),
        name_of(Config(), platform="rocm"),
        name_of(Config(), release="0.34.0"),
    ]
    assert len(set(names)) == len(names)
    assert name_of(Config(), release="0.33.2+cpu") == names[0], "patches of a minor release share"


def test_a_field_and_an_option_that_are_not_known_here_count() -> None:
    later = make_dataclass("Later", [("new_field", Any, field(default=None))], bases=(Config,), frozen=True)
    assert len({name_of(Config()), name_of(later(new_field=1)), name_of(later(new_field=object))}) == 3
    options = [{"cpu_bytes_to_use": 5, "offload_prompt_only": False}, {"cpu_bytes_to_use": 5, "new_option": 1}]
    same, new = (name_of(replace(Config(), extra_config=each)) for each in options)
    assert same == name_of(Config()) != new


def test_an_earlier_release_with_fewer_fields_has_a_name() -> None:
    class Earlier:
        parallel = Parallel()

    assert name_of(Earlier()) != name_of(Config())


def test_names_are_such_as_a_space_has() -> None:
    model = Model("name x", "org/" + "ä\n" * 100)
    name = name_of(replace(Config(), parallel=replace(Parallel(), rank=3)), model)
    assert name.startswith("org___")
    assert name.endswith("-r3")
    assert name.isascii()
    assert name.isprintable()
    assert len(name) < SPACE_NAME_BYTES_MAX - 32


def test_the_warning_says_what_is_not_seen() -> None:
    assert "--hf-overrides" in unseen_by(MODEL, "/models/llama")
    assert "revision" not in unseen_by(MODEL, "/models/llama")
    remote = unseen_by(Model("name org/m", "org/m", "it is no path of this machine"), "org/m")
    assert "the content and the revision of org/m, because it is no path of this machine" in remote
    assert "`salt`" in remote
