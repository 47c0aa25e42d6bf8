"""Moved: see ``optimizer.batcher.observations``."""

from optimizer.batcher.observations import observation as observation
from optimizer.batcher.observations import read_batch_stats as read_batch_stats
