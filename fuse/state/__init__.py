"""State of a mount: inode table, attributes, changes that are not durable yet."""
