"""Suggestions for a command or option that does not exist: a slip of the keys, or a word that other tools use.

None is better than a wrong one: a text is close if it differs by few edits for its length, or is the beginning of
exactly one name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

_WORDS: Final = {
    "copy": "cp",
    "del": "rm",
    "delete": "rm",
    "dir": "ls",
    "download": "get",
    "fetch": "get",
    "help": "--help",
    "info": "stat",
    "list": "ls",
    "mb": "bucket create",
    "mkbucket": "bucket create",
    "move": "mv",
    "pull": "get",
    "push": "put",
    "rb": "bucket rm",
    "remove": "rm",
    "rename": "mv",
    "server": "serve",
    "start": "serve",
    "undelete": "versions restore",
    "upload": "put",
    "version": "--version",
}
"""Commands of other tools, and what they are called here."""
_SUBCOMMAND_WORDS: Final = {"list": "ls", "add": "create", "make": "create", "mk": "create"} | dict.fromkeys(
    ("del", "delete", "remove", "revoke"), "rm"
)
_SHORT: Final = 4
"""Letters of a text that one edit makes another word; a longer one may have two."""
_BEGINNING: Final = 3


def suggested(error: click.ClickException) -> click.ClickException:
    """Return a usage error with the suggestions of this module in place of click's own."""
    from click import UsageError

    context = getattr(error, "ctx", None)
    typed = getattr(error, "option_name", "") or getattr(error, "command_name", "")
    if context is None or not typed or error.message is None:
        return error
    if typed.startswith("-"):
        known = [name for parameter in context.command.get_params(context) for name in (*parameter.opts,)]
        found = close(typed.lstrip("-"), {name.lstrip("-"): name for name in known if name.startswith("--")})
    elif hasattr(error, "command_name"):
        words = _WORDS if context.parent is None else _SUBCOMMAND_WORDS
        names = {name: name for name in context.command.list_commands(context)}
        word = words.get(typed, "")
        found = [word] if word and (context.parent is None or word in names) else close(typed, names)
    else:
        return error
    hint = f" (Did you mean {' or '.join(found)}?)" if found else ""
    return UsageError(error.message + hint, ctx=context)


def close(typed: str, names: dict[str, str]) -> list[str]:
    """Return the values whose keys are close to a text, at most two; none if there are more."""
    allowed = 1 if len(typed) <= _SHORT else 2
    distances = {value: _edits(typed, name, allowed) for name, value in names.items()}
    least = min(distances.values(), default=allowed + 1)
    found = [value for value, edits in distances.items() if edits == least] if least <= allowed else []
    if not found and len(typed) >= _BEGINNING:
        found = _begun(typed, names)
    return sorted(found) if len(found) <= 2 else []


def _begun(typed: str, names: dict[str, str]) -> list[str]:
    found = [value for name, value in names.items() if name.startswith(typed)]
    return found if len(found) == 1 else []


def _edits(one: str, other: str, most: int) -> int:
    """Return how many letters have to be put in, taken out, replaced or swapped with the next one; at most `most` + 1.

    Optimal string alignment: Boytsov, "Indexing methods for approximate dictionary searching" (2011).
    """
    begins_alike = one[:1] == other[:1] or one[:2] == other[:2][::-1]
    if abs(len(one) - len(other)) > most or not begins_alike:
        return most + 1
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            edits = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                edits = min(edits, rows[-2][j - 2] + 1)
            row.append(edits)
        rows.append(row)
    return min(rows[-1][-1], most + 1)
