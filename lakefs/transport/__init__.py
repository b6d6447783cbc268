"""Transport of frames: Unix and TCP streams on trio, their frame senders and receivers, socket helpers."""
