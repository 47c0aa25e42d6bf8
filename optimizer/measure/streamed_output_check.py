"""Compare the outputs of a model that streams: the concatenation of all responses to each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optimizer.core.errors import DeploymentError
from optimizer.core.interfaces import Endpoint
from optimizer.measure import inference
from optimizer.measure.output_check import BaselineOutputCheck


class StreamedOutputCheck(BaselineOutputCheck):
    """Compares the concatenated responses to each request with those of the unbatched baseline.

    So it does not matter how the outputs are distributed over the responses.
    """

    def _infer(
        self, endpoint: Endpoint, messages: Sequence[bytes], *, in_flight: int, timeout_seconds: float
    ) -> list[bytes]:
        streamed = inference.stream(endpoint, messages, in_flight=in_flight, timeout_seconds=timeout_seconds)
        return [concatenate(responses) for responses in streamed]


def concatenate(responses: Sequence[bytes]) -> bytes:
    """Return one serialized ModelInferResponse with the contents of all ``responses``, in their order.

    Each output has one dimension: the number of its elements. No responses give a response without outputs. Raises
    DeploymentError if a response is invalid or the type of an output changes.
    """
    from google.protobuf.message import DecodeError
    from tritonclient.grpc.service_pb2 import ModelInferResponse

    types: dict[str, str] = {}
    elements: dict[str, int] = {}
    contents: dict[str, list[bytes]] = {}
    for serialized in responses:
        try:
            response = ModelInferResponse.FromString(serialized)
        except DecodeError as error:
            raise DeploymentError("the server sent a response that is no ModelInferResponse") from error
        outputs, raws = response.outputs, response.raw_output_contents
        if len(outputs) != len(raws):
            raise DeploymentError(f"a response has {len(outputs)} outputs, but the contents of {len(raws)}")
        for output, raw in zip(outputs, raws, strict=True):
            if types.setdefault(output.name, output.datatype) != output.datatype:
                raise DeploymentError(
                    f"output {output.name} is {types[output.name]} in one response and {output.datatype} in another"
                )
            elements[output.name] = elements.get(output.name, 0) + int(np.prod(output.shape))
            contents.setdefault(output.name, []).append(raw)
    joined = ModelInferResponse()
    for name, datatype in types.items():
        joined.outputs.add(name=name, datatype=datatype, shape=[elements[name]])
        joined.raw_output_contents.append(b"".join(contents[name]))
    return bytes(joined.SerializeToString())
