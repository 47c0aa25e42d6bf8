"""Compare the outputs of a stateful model with those that its sequences get when they are sent alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from typing import Any

from optimizer.core.interfaces import Endpoint
from optimizer.measure import inference
from optimizer.measure.load_client.sequences import fresh_ids, step_parameters
from optimizer.measure.output_check import REFERENCE_SECONDS, TIMEOUT_SECONDS, BaselineOutputCheck, ReferenceOutputs

SEQUENCES = 16  # distinct ones, or as many as the baseline answers in REFERENCE_SECONDS
MAX_STEPS = 8  # of a sequence
MIN_IN_FLIGHT, MAX_IN_FLIGHT = 16, 64  # sequences of a check, each in a thread of its own
