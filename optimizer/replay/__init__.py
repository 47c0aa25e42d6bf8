"""``tune replay``: the search of ``tune run`` on a recorded table, in seconds and without a server."""
