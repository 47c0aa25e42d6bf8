"""What is to be tuned, found and checked: a profile, a repository, an ONNX or PyTorch file, and its parts."""
