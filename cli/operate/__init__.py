"""For operators: gc, status, fsck, scrub, doctor, config, completion."""
