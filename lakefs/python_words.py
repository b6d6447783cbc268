"""Messages of errors as Python says them: what to call, in the place of a command or an option.

An error's `message` speaks to a user of the command line, as all faces show it.  `str(error)`, which a traceback and
`print` show to a programmer, passes here.  What only a shell can do stays as it is: to start an engine, and to check or
mend a store that no engine serves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_NAME: Final = r"([^\s,;)]+)"
_Said = str | Callable[[re.Match[str]], str]

WORDS: Final[tuple[tuple[str, _Said], ...]] = (
    (rf"lake bucket create {_NAME}", r'lake.create_bucket("\1"), or the argument create_bucket=True'),
    (rf"lake bucket rm {_NAME}", r'lake.remove_bucket("\1")'),
    (rf"lake rm -r {_NAME}", lambda found: f'lake.remove_tree("{found[1].rstrip("/")}")'),
    (rf"lake ls {_NAME}", r'lake.ls("\1")'),
    (rf"lake get {_NAME} FILE", r'lake.get_file("\1", FILE)'),
    (rf"lake put FILE {_NAME}", r'lake.put("\1", pathlib.Path(FILE))'),
    (r"give its content to stdin instead: lake put -", "put its content: lake.put(NAME, path.read_bytes())"),
    (r"lake kv set SPACE --quota SIZE", "lake.space(SPACE, quota=SIZE)"),
    (r"lake key ls", "lake.access_keys()"),
    (r"lake key rm", "lake.remove_access_key(KEY)"),
    (r"lake get, lake put", "lake.get, lake.put"),
    (r"lake cp, lake rm", "lake.copy, lake.remove"),
    (r"lake fsck --full", "lake.fsck(full=True)"),
    (r"lake fsck(?! --)", "lake.fsck()"),
    (r"lake gc", "lake.gc()"),
    (r"`?lake status`?", "lake.status()"),
    (r"--server or LAKE_SERVER", "lakefs.connect(ADDRESS) or LAKE_SERVER"),
    (r"use --server", "use its address: lakefs.connect(ADDRESS)"),
    (r"LAKE_TOKEN or --token-file", "LAKE_TOKEN or lakefs.connect(ADDRESS, token=TOKEN)"),
    (r"lake put and lake get", "lake.put and lake.get"),
    (r"--follow (stores|takes) what it points to", r"follow=True \1 what it points to"),
    (r"--force replaces it", "keep_newer=False replaces it"),
    (r"give --follow to write", "give follow=True to write"),
    (r"a folder; use -r", "a folder; use lake.put_tree"),
    (r"and get -r fetches only those", "and lake.get_tree fetches only those"),
)
"""Pattern and replacement; the longer of two that begin alike is first."""
_COMMAND: Final = re.compile(r"\blake |--[a-z]| -r\b")
_WORDS: Final = [(re.compile(pattern), said) for pattern, said in WORDS]


def in_python(message: str) -> str:
    """Return the message with calls in the place of commands and options."""
    if _COMMAND.search(message) is None:
        return message
    for pattern, said in _WORDS:
        message = pattern.sub(said, message)
    return message
