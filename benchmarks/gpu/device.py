"""Print what NVML reads of each GPU, idle and under load, and what PyTorch sees of it.

    python benchmarks/gpu/device.py

It prints one line for each, so that a value that is None on a machine is known before a study depends on it. Without
CUDA there are no values under load. It takes a few seconds.
"""

from __future__ import annotations

import os
import time

from optimizer.machine.nvml import survey

LOAD_SECONDS = 2.0


def main() -> None:
    found = survey()
    print(f"NVML: driver {found.driver or 'unknown'}, {len(found.gpus)} GPUs {found.message}")
    for gpu in found.gpus:
        print(f"{gpu.name}, {gpu.uuid}, MIG {'on' if gpu.mig else 'off'}; idle: {gpu.read()}")
    began = time.monotonic()
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, imported in {time.monotonic() - began:.1f} s")
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        return
    began = time.monotonic()
    matrix = torch.ones(8192, 8192, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}: first call in {time.monotonic() - began:.1f} s")
    began, products = time.monotonic(), 0
    while time.monotonic() - began < LOAD_SECONDS:
        matrix @ matrix
        torch.cuda.synchronize()
        products += 1
    for gpu in found.gpus:
        print(f"after {products} products in {LOAD_SECONDS:g} s: {gpu.read([os.getpid()])}; {gpu.processes()}")
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    began = time.monotonic()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    print(f"page-locked copy: {len(pinned) / (time.monotonic() - began) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
