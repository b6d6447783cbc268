"""Commands on objects and names: put, get, cat, ls, stat, du, rm, mv, cp, bucket, key."""
