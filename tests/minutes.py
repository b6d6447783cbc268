"""Where the minutes of a run went: the slowest test files, by the time of their tests.

pytest -p tests.minutes ...
"""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import Any, Final

import pytest

SHOWN: Final = 20


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest files, and what they take of the time of all tests."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if not seconds:
        return
    whole = sum(seconds.values())
    terminalreporter.section(f"the slowest of {len(seconds)} files, which took {whole:.0f} s of all processes")
    for name, taken in sorted(seconds.items(), key=itemgetter(1), reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{taken:7.0f} s {taken / whole:5.1%}  {name}")
