"""Filter rules, with the syntax and the order of rclone's `--include`, `--exclude` and `--filter`.

A rule includes or excludes the names that its pattern matches; the first rule that matches decides, and a name that no
rule matches is included.  Names are paths below the root of a side, without a slash in front.

    *          any characters but /            [a-z] [!a-z]   one character of a class
    **         any characters                  {a,b}          one of these patterns
    ?          one character but /             {{regexp}}     a regular expression
    /x         x at the root only              \\c             the character c itself
    x          the last parts of a path        x/             all that is in the folder x

No library has these rules: in those for shells `**` is a whole part of a path, and braces hold no slash.
`tests/unit/lakefs/sync/test_filters.py` compares them with rclone itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lakefs.errors import InvalidArgument

_LEADING_FLAGS: Final = re.compile(r"\(\?([ims]+)\)")
_SET_OPERATORS: Final = frozenset("[&~|^")
"""Characters that a class of `re` may take for more than themselves."""
_META: Final = frozenset(".+()|^$")
_POSIX_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\t ",
    "digit": "0-9",
    "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


@dataclass(frozen=True)
class Rule:
    """One rule: a pattern, and what becomes of the names that it matches."""

    includes: bool
    pattern: re.Pattern[str]
    covers_all_below: bool
    """True if the pattern, once it has matched a folder's path with its slash, matches each name in the folder."""


class Rules:
    """Rules in the order in which they are tried."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = tuple(rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def takes(self, path: str) -> bool:
        """Return True if a name is included."""
        for rule in self._rules:
            if rule.pattern.search(path):
                return rule.includes
        return True

    def leaves_out(self, folder: str) -> bool:
        """Return True if no name in a folder can be included; `folder` ends in `/`.  Such a folder need not be read."""
        for rule in self._rules:
            if rule.includes:
                return False
            if rule.covers_all_below and rule.pattern.search(folder):
                return True
        return False


def rules_of(
    include: Sequence[str] = (), exclude: Sequence[str] = (), filters: Sequence[str] = (), *, ignore_case: bool = False
) -> Rules:
    """Return the rules of the options, in rclone's order: `include`, then `exclude`, then `filters`.

    `filters`: `+ PATTERN`, `- PATTERN`, or `!`, which forgets the rules before it.  With any `include`, a name that no
    rule matches is left out.  InvalidArgument.
    """
    rules = [_rule(pattern, True, ignore_case) for pattern in include]
    rules += [_rule(pattern, False, ignore_case) for pattern in exclude]
    for line in filters:
        if line == "!":
            rules.clear()
        elif line[:2] in ("+ ", "- "):
            rules.append(_rule(line[2:], line[0] == "+", ignore_case))
        else:
            raise InvalidArgument(f"filter {line!r} begins with neither '+ ' nor '- '", subject=line)
    if include:
        rules.append(_rule("/**", False, ignore_case))
    return Rules(rules)


def lines_of(text: str) -> list[str]:
    """Return the rules in a file: one a line, without blank lines and those that begin with `#` or `;`."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and line[0] not in "#;"]


def _rule(glob: str, includes: bool, ignore_case: bool) -> Rule:
    if glob.endswith("/"):
        # A pattern for a folder only helps rclone to leave folders unread; excluded, all in it is left out.
        glob += "**" if not includes else ""
    try:
        text = _Translation(glob).regexp()
        pattern = re.compile(text, re.IGNORECASE if ignore_case else 0)
    except (re.error, ValueError) as error:
        raise InvalidArgument(f"filter pattern {glob!r}: {error}", subject=glob) from error
    return Rule(includes, pattern, glob.endswith("**") and not glob.endswith("\\**"))


class _Translation:
    """The translation of one pattern to a regular expression, character by character."""

    def __init__(self, glob: str) -> None:
        self._glob = glob
        self._at = 0
        self._depth = 0
        """Braces that are open."""

    def regexp(self) -> str:
        """Return the regular expression, to be searched for in a path.  ValueError."""
        is_rooted = self._glob.startswith("/")
        self._at = 1 if is_rooted else 0
        parts = [r"\A" if is_rooted else r"(?:\A|/)"]
        while self._at < len(self._glob):
            parts.append(self._next())
        if self._depth:
            raise ValueError("a '{' is not closed")
        return "".join(parts) + r"\Z"

    def _next(self) -> str:
        glob, at = self._glob, self._at
        char = glob[at]
        self._at += 1
        if char == "*":
            return self._stars()
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._character_class()
        if char == "{":
            if glob.startswith("{{", at):
                return self._raw_regexp()
            self._depth += 1
            return "(?:"
        if char == "}":
            if not self._depth:
                raise ValueError("a '}' has no '{'")
            self._depth -= 1
            return ")"
        if char == "]":
            raise ValueError("a ']' has no '['")
        if char == "," and self._depth:
            return "|"
        if char == "?":
            return "[^/]"
        return "\\" + char if char in _META else char

    def _stars(self) -> str:
        count = 1
        while self._glob.startswith("*", self._at):
            count += 1
            self._at += 1
        if count > 2:
            raise ValueError("more than two stars follow each other")
        return "[^/]*" if count == 1 else "(?s:.*)"

    def _escape(self) -> str:
        if self._at == len(self._glob):
            raise ValueError("a '\\' ends it")
        char = self._glob[self._at]
        self._at += 1
        return "\\" + char if not char.isalnum() or char in "dDsSwW" else re.escape(char)

    def _character_class(self) -> str:
        inside: list[str] = []
        negation = "^" if self._glob[self._at : self._at + 1] in ("!", "^") else ""
        self._at += len(negation)
        while True:
            char = self._glob[self._at : self._at + 1]
            if not char:
                raise ValueError("a '[' is not closed")
            self._at += 1
            if char == "]":
                break
            if char == "[" and self._glob.startswith(":", self._at):
                inside.append(self._named_characters())
            elif char == "\\":
                inside.append(self._escape())
            else:
                inside.append("\\" + char if char in _SET_OPERATORS else char)
        if not inside:
            raise ValueError("a '[]' holds no character")
        return f"[{negation}{''.join(inside)}]"

    def _named_characters(self) -> str:
        end = self._glob.find(":]", self._at)
        name = self._glob[self._at + 1 : end]
        if end < 0 or name not in _POSIX_CLASSES:
            raise ValueError(f"'[:{name}:]' is no class of characters")
        self._at = end + 2
        return _POSIX_CLASSES[name]

    def _raw_regexp(self) -> str:
        end = self._glob.find("}}", self._at + 1)
        if end < 0:
            raise ValueError("a '{{' is not closed")
        while self._glob.startswith("}}}", end):  # the longest expression, as in {{a{2}}}
            end += 1
        inside = self._glob[self._at + 1 : end]
        self._at = end + 2
        flags = _LEADING_FLAGS.match(inside)
        return f"(?{flags.group(1)}:{inside[flags.end() :]})" if flags else f"(?:{inside})"
