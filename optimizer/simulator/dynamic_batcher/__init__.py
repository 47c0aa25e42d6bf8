"""The compiled simulation of Triton's dynamic batcher.

``event_loop.py`` is its entry, and ``records.py`` declares its data. ``clients.py``, ``queue.py``, ``batcher.py`` and
``instances.py`` are the parts of the simulated system. ``batch_choice.py`` is Triton's rule for the next batch,
``cyclic_tables.py`` holds what differs between requests and between executions, and ``interval.py`` measures.
Compiled code is stored with a hash of all files of this folder.
"""
