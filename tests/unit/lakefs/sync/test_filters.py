"""Filter rules: rclone's own examples, rclone itself, and folders that need not be read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from lakefs.errors import InvalidArgument
from lakefs.sync.filters import Rules, lines_of, rules_of

EXAMPLES = [
    # From rclone's manual, "Filter pattern examples", "Patterns for matching path/file names" and what follows them.
    ("*.jpg", ["file.jpg", "dir/file.jpg"], ["file.png", "dir/file.png"]),
    ("/*.jpg", ["file.jpg", "file2.jpg"], ["file.png", "dir/file.jpg"]),
    ("*.{jpg,png}", ["file.jpg", "dir/file.png"], ["file.gif", "dir/file.gif"]),
    ("dir/**", ["dir/anyfile", "subdir/dir/subsubdir/anyfile"], ["file.png", "subdir/file.png"]),
    ("*.t?t", ["file.txt", "dir/file.tzt"], ["file.qxt", "dir/file.png"]),
    ("*.[a-z]", ["file.a", "dir/file.b"], ["file.0", "dir/file.1"]),
    (r"*.\?\?\?", ["file.???", "dir/file.???"], ["file.abc", "dir/file.def"]),
    (r"*.\d\d\d", ["file.012", "dir/file.345"], ["file.abc", "dir/file.def"]),
    ("*.{{jpe?g}}", ["file.jpeg", "dir/file.jpg"], ["file.png", "dir/file.jpeeg"]),
    (r"/{{.*\.jpe?g}}", ["file.jpeg", "file.jpg"], ["file.png"]),
    ("file.jpg", ["file.jpg", "directory/file.jpg"], ["afile.jpg", "directory/afile.jpg"]),
    ("/file.jpg", ["file.jpg"], ["afile.jpg", "directory/file.jpg"]),
    ("potato", ["potato"], ["POTATO"]),
    ("*.{{(?i)jpg}}", ["file.jpg", "file.JPG"], ["file.png"]),
    (r"{{start[^/]*end\.jpg}}", ["startXend.jpg"], ["start/end.jpg"]),
    ("/excl/**", ["excl/123.jpg"], ["incl/document.pdf", "incl/excl/x"]),
    (r"*\[{JP,KR,HK}\]*", ["a[JP]b", "[HK]"], ["a[US]b", "JP"]),
    ("??[^[:punct:]]*", ["abcd", "x/abc"], ["ab-d", "ab"]),
    ("{A,B}/**", ["A/x", "B/y/z"], ["C/x"]),
    ("{dir1/**,dir2/**}", ["dir1/x", "dir2/y"], ["dir3/x"]),
    ("directory/*", ["directory/x"], ["directory/sub/x"]),
    ("a+b(c)|^$.txt", ["a+b(c)|^$.txt"], ["aab(c)|^$.txt"]),
    ("a**b", ["axb", "a/x/b", "x/ab"], ["a/c"]),
    ("a{{x{2}}}", ["axx"], ["ax"]),
]
PATTERNS = [pattern for pattern, _, _ in EXAMPLES]
PATHS = sorted({path for _, matched, unmatched in EXAMPLES for path in (*matched, *unmatched)})
PATH_LIKE = st.text("ab/.", min_size=1, max_size=8).map(lambda text: "/".join(filter(None, text.split("/"))))


@pytest.mark.parametrize(("pattern", "matched", "unmatched"), EXAMPLES)
def test_patterns_match_as_rclones_manual_says(pattern: str, matched: list[str], unmatched: list[str]) -> None:
    rules = rules_of(include=[pattern])
    assert [path for path in matched if not rules.takes(path)] == []
    assert [path for path in unmatched if rules.takes(path)] == []


ORDERS: list[list[str]] = [
    ["--include", "*.jpg", "--include", "dir/**"],
    ["--exclude", "*.jpg", "--exclude", "/dir/"],
    ["--exclude", "dir/"],
    ["--include", "/directory/"],
    ["--include", "*.jpg", "--exclude", "file.jpg"],
    ["--exclude", "file.jpg", "--include", "*.jpg"],
    ["--filter", "- /dir1/", "--filter", "- dir2/", "--filter", "+ *.jpg", "--filter", "- **"],
    ["--filter", "+ *.jpg", "--filter", "!", "--filter", "- *.png"],
    ["--filter", "- *.jpg", "--include", "*.jpeg"],
    ["--ignore-case", "--exclude", "POTATO"],
]


@pytest.mark.skipif(shutil.which("rclone") is None, reason="rclone is not installed")
def test_rules_take_the_files_that_rclone_takes(tmp_path: Path) -> None:
    files = [path for path in PATHS if not any(other.startswith(path + "/") for other in PATHS)]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    options = ORDERS + [[flag, pattern] for pattern in PATTERNS for flag in ("--include", "--exclude")]
    for given_options in options:
        # A regular expression among the includes, which no file matches: rclone then reads all folders.  Else it infers
        # from `dir/**` that `subdir/` need not be read, and misses `subdir/dir/x`, which its manual has as a match.
        reading_all = ["--include", "{{no file}}"] if "--include" in given_options else []
        command = ["rclone", "lsf", "-R", "--files-only", "--config", "", *given_options, *reading_all, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rules = parsed(given_options)
        assert sorted(done.stdout.splitlines()) == [path for path in files if rules.takes(path)], given_options


def parsed(options: list[str]) -> Rules:
    found: dict[str, list[str]] = {"--include": [], "--exclude": [], "--filter": []}
    words = iter(options)
    ignore_case = False
    for word in words:
        if word == "--ignore-case":
            ignore_case = True
        else:
            found[word].append(next(words))
    return rules_of(found["--include"], found["--exclude"], found["--filter"], ignore_case=ignore_case)


def test_a_class_with_an_exclamation_mark_holds_the_other_characters() -> None:
    # As rclone's manual says; rclone 1.60 takes the mark for a character of the class.
    assert rules_of(include=["a[!b]c"]).takes("axc")
    assert not rules_of(include=["a[!b]c"]).takes("abc")


@pytest.mark.parametrize("pattern", ["a[", "a]", "{a", "a}", "***", "a\\", "{{a", "[]", "[[:nope:]]", "{{(}}", "[z-a]"])
def test_a_pattern_that_is_none_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="filter pattern"):
        rules_of(include=[pattern])
    with pytest.raises(InvalidArgument, match="begins with neither"):
        rules_of(filters=[pattern])


def test_a_file_of_rules_has_comments_and_blank_lines() -> None:
    assert lines_of("# all\n\n + *.jpg \n; or\n- *\n") == ["+ *.jpg", "- *"]


@given(
    st.lists(st.tuples(st.sampled_from("+-"), st.sampled_from(["a/", "a/**", "/b/**", "*", "**", "a*", "b/a", "/a/"]))),
    PATH_LIKE,
    PATH_LIKE,
)
def test_a_folder_that_is_left_out_holds_no_name_that_is_taken(
    lines: list[tuple[str, str]], folder: str, below: str
) -> None:
    rules = rules_of(filters=[f"{sign} {pattern}" for sign, pattern in lines])
    if folder and below and rules.leaves_out(folder + "/"):
        assert not rules.takes(f"{folder}/{below}")


def test_an_excluded_folder_is_left_out_unless_a_rule_before_may_include_a_name_in_it() -> None:
    assert rules_of(exclude=["*.o", "cache/"]).leaves_out("x/cache/")
    assert not rules_of(exclude=["cache/"]).leaves_out("x/caches/")
    assert not rules_of(filters=["+ keep", "- cache/"]).leaves_out("cache/")
