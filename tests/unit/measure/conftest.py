"""Requests to the server of the tests of load generators and output checks."""

from pathlib import Path

import pytest

from tests.inference_server import FakeInferenceServer


@pytest.fixture(scope="session")
def random_requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return random requests to a FakeInferenceServer."""
    return FakeInferenceServer(dict).write_requests(tmp_path_factory.mktemp("requests"))
