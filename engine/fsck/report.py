"""What a check of a store found: counted all, listed up to a bound; the document that `lake fsck --json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from lakefs.findings import Finding

FINDINGS_MAX: Final = 1000
"""Findings listed one by one; all are counted."""


class Problem(NamedTuple):
    """What is wrong with something: its kind, and a message."""

    finding: Finding
    message: str


@dataclass
class Report:
    """What a check found."""

    level: str
    damage: int = 0
    notes: int = 0
    findings: list[dict[str, str]] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    def found(self, subject: str, finding: Finding, message: str) -> None:
        """Add a finding."""
        if finding.severity == "damage":
            self.damage += 1
        else:
            self.notes += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding.as_json(subject, message))

    def count(self, what: str, number: int) -> None:
        """Add to what was looked at."""
        self.checked[what] = self.checked.get(what, 0) + number

    def as_json(self) -> dict[str, Any]:
        """The report as `lake fsck --json` prints it."""
        return {
            "level": self.level,
            "damage": self.damage,
            "notes": self.notes,
            "checked": self.checked,
            "findings": self.findings,
        }
