"""The report of a check of a store: all findings counted, listed up to a bound; printed by `lake fsck --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lakefs.findings import Finding

FINDINGS_MAX: Final = 1000
"""Most findings listed one by one; all are counted."""


class Problem(NamedTuple):
    """A problem: its kind, and a message."""

    finding: Finding
    message: str


@dataclass
class Report:
    """The findings of one check."""

    level: str
    damage: int = 0
    notes: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    def found(self, subject: str, finding: Finding, message: str) -> None:
        """Add a finding."""
        self.add(finding.as_json(subject, message))

    def add(self, found: dict[str, str]) -> None:
        """Add a finding as reports list it."""
        if found["severity"] == "damage":
            self.damage += 1
        else:
            self.notes += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(found)
        assert len(self.findings) == min(self.damage + self.notes, FINDINGS_MAX), "all are counted"

    def take(self, report: Mapping[str, Any]) -> None:
        """Add the findings and counts of another report, as `as_json` returns it."""
        for finding in report["findings"]:
            self.add(finding)
        listed = sum(finding["severity"] == "damage" for finding in report["findings"])
        self.damage += report["damage"] - listed  # what it does not list is behind FINDINGS_MAX here, too
        self.notes += report["notes"] - (len(report["findings"]) - listed)
        assert len(self.findings) == min(self.damage + self.notes, FINDINGS_MAX), "all are counted"
        for what, number in report["checked"].items():
            self.count(what, number)

    def count(self, what: str, number: int) -> None:
        """Add to the count of checked things of a kind."""
        assert number >= 0, "counts grow"
        self.checked[what] = self.checked.get(what, 0) + number

    def as_json(self) -> dict[str, Any]:
        """Return the report as `lake fsck --json` prints it."""
        return {
            "level": self.level,
            "damage": self.damage,
            "notes": self.notes,
            "checked": self.checked,
            "findings": self.findings,
        }
