"""The model to tune: profiles, repositories, ONNX and PyTorch files, built-in models and request data."""
