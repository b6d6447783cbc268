"""Names in a mount: look-ups, changes, folder listings, extended attributes, watches."""
