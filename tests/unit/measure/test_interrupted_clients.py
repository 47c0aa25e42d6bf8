"""Tests for an interrupt that arrives while a client of tritonclient is constructed."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from optimizer.core.endpoint import Connection, ProtocolName
from optimizer.measure.server_calls import open_client

CONSTRUCTORS = {
    "grpc": tritonclient.grpc.InferenceServerClient.__init__.__code__,
    "http": tritonclient.http.InferenceServerClient.__init__.__code__,
}


@pytest.mark.parametrize("protocol", CONSTRUCTORS)
def test_an_interrupted_construction_prints_no_traceback(
    protocol: ProtocolName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destructor of a client that is only partly constructed raises AttributeError."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    interrupted = []

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is CONSTRUCTORS[protocol]:
            interrupted.append(protocol)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            open_client(Connection("localhost:1", protocol)).version()
    finally:
        sys.setprofile(None)
    assert interrupted == [protocol]
    assert not ignored
