"""Test the errors about the samples of a request that the model or the load generator cannot take."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.core.errors import BadInputError
from optimizer.machine.hardware import Hardware
from optimizer.options.run_options import RunOptions
from optimizer.study.task import prepare_task
from tests.repositories import write_sleeper

TWO_CPUS = Hardware((), "a CPU", 2, 1 << 30)
CASES = [
    ("64", "64 is above the model's max_batch_size 8; lower it, "),
    ("1*9|8*1", r"1\*9\|8\*1 is a mix of up to 8 samples per request, but perf_analyzer sends requests of one size"),
]


@pytest.mark.parametrize(("size", "said"), CASES)
def test_a_size_of_the_profile_is_refused_with_its_line(size: str, said: str, tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    profile = tmp_path / "p.yaml"
    profile.write_text(f"model: {{repository: models, name: {model}}}\nrequest:\n  batch_size: {size}\n")
    with pytest.raises(BadInputError, match=rf"p\.yaml:3: request\.batch_size: {said}"):
        prepare_task(RunOptions(str(profile)), TWO_CPUS, print)


@pytest.mark.parametrize(("size", "said"), CASES)
def test_a_size_of_the_command_line_is_refused_with_its_option(size: str, said: str, tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    options = RunOptions(model, model_repository=str(tmp_path / "models"), request_batch_size=size)
    with pytest.raises(BadInputError, match=f"^--request-batch-size {said}"):
        prepare_task(options, TWO_CPUS, print)


def test_a_size_of_a_trace_above_the_space_is_refused_with_its_column(tmp_path: Path) -> None:
    model = write_sleeper(tmp_path / "models", 1.0).name
    trace, profile = tmp_path / "trace.csv", tmp_path / "p.yaml"
    trace.write_text("time_s,batch_size\n" + "".join(f"{i / 100},{1 + i % 2 * 6}\n" for i in range(100)))
    profile.write_text(f"model: {{repository: models, name: {model}}}\nspace: {{max_batch_size: [2, 4]}}\n")
    options = RunOptions(str(profile), load="rate", arrivals=str(trace))
    with pytest.raises(BadInputError, match="batch_size 7 is above every max_batch_size of ") as caught:
        prepare_task(options, TWO_CPUS, print)
    assert str(caught.value).startswith(f"{trace}: ")
