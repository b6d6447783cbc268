"""The walker of a lake: shards are made anew and moved home, members come and go."""
