"""Shared by commands: target, output, progress, logs, process, notices to systemd."""
