"""Hypothesis strategies for keys that break naive trees: empty parts, dots, neighbours of `/`, parts to be split."""

from __future__ import annotations

from hypothesis import strategies as st

from lakefs.limits import KEY_BYTES_MAX

_ALPHABET = "ab!-.0é\U0001f642"
"""`!`, `-`, `.` sort before `/`, `0` right after it; two characters take several bytes."""


def components() -> st.SearchStrategy[str]:
    """Draw one part of a key, mostly short; some around 480 and 960 bytes, cut inside a character now and then."""
    short = st.text(_ALPHABET, max_size=3)
    lengths = st.sampled_from([478, 479, 480, 481, 500, 959, 960, 961])
    long = st.builds(lambda n, end: "x" * n + end, lengths, st.sampled_from(["", "", "!", "0", "é", "é!"]))
    return st.one_of(short, short, st.sampled_from(["", ".", "..", "a"]), short, long)


def keys() -> st.SearchStrategy[str]:
    """Draw acceptable keys of up to five parts, every third one a folder's."""
    parts = st.lists(components(), min_size=1, max_size=5)
    joined = st.builds(lambda p, slash: "/".join(p) + slash, parts, st.sampled_from(["", "", "/"]))
    return joined.filter(lambda key: 0 < len(key.encode()) <= KEY_BYTES_MAX)
