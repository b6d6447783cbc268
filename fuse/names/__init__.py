"""Names in a mount: look-ups, changes, folders, extended attributes, watches."""
