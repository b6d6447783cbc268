"""Mirrored disks: one store's files on several devices of a machine, of which some may be lost."""
