"""Completion of names in the lake, as a shell asks for it while somebody types.

Rules kept here:
- Nothing is ever written to the terminal: whatever goes wrong, there are no suggestions.
- The engine is asked once or twice, with a short limit; a store is never opened for it (`--data`).
- A page of names is enough: nobody reads on behind so many.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from cli.terminal.target import Target
from lakefs.errors import LakeError
from lakefs.names import SCHEME

if TYPE_CHECKING:
    from lakefs.wire.messages import Message, Request

TIMEOUT_S: Final = 0.5
NAMES_MAX: Final = 200
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SPECIAL: Final = re.compile(r"([^\w@%+=:,./-])", re.ASCII)
_BASH: Final = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete $1 2>/dev/null)
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            COMPREPLY+=("$value")
            if [[ $value == */ ]]; then
                compopt -o nospace
            fi
        fi
    done
    return 0
}

%(complete_func)s_setup() {
    complete -o nosort -F %(complete_func)s %(prog_name)s
}

%(complete_func)s_setup;
"""


class BashNames(BashComplete):
    """bash: no space behind a folder, and a name with spaces is one word."""

    source_template = _BASH

    def format_completion(self, item: CompletionItem) -> str:
        value = _SPECIAL.sub(r"\\\1", item.value) if item.type == "plain" else item.value
        return f"{item.type},{value}"


add_completion_class(BashNames)


def complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete BUCKET/KEY: first buckets, then what is in the folder that was typed."""
    from lakefs.wire.messages import Listed, ListNames

    scheme = SCHEME if incomplete.startswith(SCHEME) else ""
    bucket, slash, key = incomplete.removeprefix(SCHEME).partition("/")
    if not slash:
        return [CompletionItem(f"{scheme}{name}/") for name in _buckets(context, bucket)]
    found = _answer(context, ListNames(bucket, key, "", "/", NAMES_MAX, True))
    if not isinstance(found, Listed):
        return []
    keys = [entry.key for entry in found.entries if entry.key != key and not _CONTROL.search(entry.key)]
    return [CompletionItem(f"{scheme}{bucket}/{key}") for key in keys]


def complete_sources(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a local file, or a name in the lake: each word of lake put may be either."""
    return [*complete_names(context, parameter, incomplete), CompletionItem(incomplete, type="file")]


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a local file."""
    return [CompletionItem(incomplete, type="file")]


def complete_buckets(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a bucket."""
    return [CompletionItem(name) for name in _buckets(context, incomplete)]


def complete_access_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an access key."""
    from lakefs.wire.messages import AccessKeyList, AccessKeys

    found = _answer(context, AccessKeyList())
    keys = [key.access_key for key in found.keys] if isinstance(found, AccessKeys) else []
    return [CompletionItem(key) for key in keys if key.startswith(incomplete)]


def complete_spaces(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a space of keyed blobs."""
    from lakefs.wire.messages import SpaceList, Spaces

    found = _answer(context, SpaceList())
    names = [space.name for space in found.spaces] if isinstance(found, Spaces) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and not _CONTROL.search(name)]


def _buckets(context: click.Context, begun: str) -> list[str]:
    from lakefs.wire.messages import BucketList, Buckets

    found = _answer(context, BucketList())
    names = [bucket.name for bucket in found.buckets] if isinstance(found, Buckets) else []
    return [name for name in names if name.startswith(begun)]


def _answer(context: click.Context, request: Request) -> Message | None:
    """Return the engine's answer; None if there is none at once, for whatever reason."""
    target = context.find_object(Target)
    if target is None or target.data is not None:
        return None
    try:
        return target.ask(request, timeout_s=TIMEOUT_S).message
    except (LakeError, OSError, ValueError):
        return None  # somebody is typing: a message would stand in the middle of the line
