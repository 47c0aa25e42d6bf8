"""The tables from which successive requests and executions take elements in turn, and then from the start again.

The indices are kept, because the modulo operator would take another 8 % of the time of a simulation.
"""

from __future__ import annotations

from optimizer.simulator.compilation import inlined
from optimizer.simulator.dynamic_batcher.records import MixedRequest, ScenarioRow, State, Tables


@inlined
def next_gap(state: State, tables: Tables) -> int:
    """Return the additional distance of the next arrival from the previous one."""
    i = state.gap_index
    state.gap_index = _following(i, len(tables.gaps))
    return int(tables.gaps[i])


@inlined
def next_factor(state: State, tables: Tables) -> float:
    """Return the factor on the service time of the next execution."""
    i = state.factor_index
    state.factor_index = _following(i, len(tables.factors))
    return float(tables.factors[i])


@inlined
def next_mixed_request(state: State, scenario: ScenarioRow, tables: Tables) -> MixedRequest:
    """Return the size, shape and level of the next request to arrive, where requests have a mix."""
    i = state.mix_index
    state.mix_index = _following(i, scenario.mix_to - scenario.mix_from)
    request: MixedRequest = tables.mix[scenario.mix_from + i]
    return request


@inlined
def _following(index: int, length: int) -> int:
    return index + 1 if index + 1 < length else 0
