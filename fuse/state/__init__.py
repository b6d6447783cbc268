"""What a mount consists of: inode table, attributes, changes that are not durable yet."""
