"""Logs of a process that has a store open: one line an event on stderr, at the configured level and above."""

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
