"""Test the JSON that commands print."""

from __future__ import annotations

import math

import pytest

from optimizer.cli.output import print_json


def test_json_is_indented_or_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"verdict": "PASS"})
    print_json({"verdict": "PASS"}, None)
    assert capsys.readouterr().out == '{\n  "verdict": "PASS"\n}\n{"verdict": "PASS"}\n'


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_does_not_have_is_no_result(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"throughput_infer_per_sec": value})
