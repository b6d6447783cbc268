"""`lake fsck --repair` on stores that are damaged on purpose, file by file and way by way."""
