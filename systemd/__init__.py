"""Running as a service: unit, users and folders for systemd, and the notifications that the unit waits for."""
