"""lake bench: engines, mounts and load for half a minute."""
