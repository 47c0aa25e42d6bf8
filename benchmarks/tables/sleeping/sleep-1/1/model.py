import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sleeps 4 ms and 0.5 ms for each sample of a batch."""

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        samples = sum(tensor.shape()[0] for tensor in tensors)
        time.sleep((4 + 0.5 * samples) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor.as_numpy())]) for tensor in tensors]
