"""What commands share: target, output, progress, logs, process, notices to systemd."""
