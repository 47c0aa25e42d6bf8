import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Sleeps 2 ms and 3 ms for each four samples of a batch that are begun."""

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        samples = sum(tensor.shape()[0] for tensor in tensors)
        time.sleep((2 + 3 * -(-samples // 4)) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor.as_numpy())]) for tensor in tensors]
