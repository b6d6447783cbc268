"""Logs of a process that serves, or that opens a store itself: one line an event, at a given level and above.

They are written to stderr; a mount in the background has a file of bounded size instead (`cli.mount.daemon`).
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def log_to_stderr(level: str, file: TextIO | None = None) -> None:
    """Send every log of this process to stderr, or to `file` instead; colours only on a terminal."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file or sys.stderr),
        cache_logger_on_first_use=True,
    )
