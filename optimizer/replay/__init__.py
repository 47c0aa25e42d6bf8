"""``tune replay``: the engine of ``tune run`` on a recorded table, in seconds, without a server."""
