"""Compare the CPU time of models for perf_analyzer's own random requests with that for tune's.

    python benchmarks/random_requests.py [--rounds 21] [--samples 16] [--models mlp dlrm …]

perf_analyzer fills random inputs once, each byte with ``rand()`` (``DataLoader::GenerateData`` of its
data_loader.cc), and sends this request again and again. tune's are the file of ``--input-data random``. Each model is
executed by ONNX Runtime in this process, on one thread and without a server, so that the CPU time depends on the data
alone. The two kinds of requests alternate within each round.

Prints a Markdown table: the median CPU time of a batch for both kinds, and the ratio with its interval at 95 %. The
latest one is in random_requests.md.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Sequence

import numpy as np
import onnxruntime

from lib.intervals import ratio_interval
from lib.measured_model import prepare_model
from lib.output import measured_on, print_head, print_title, row
from optimizer.config.model_config_proto import DataType
from optimizer.config.model_source import ModelSource
from optimizer.model.input_data import InputSample, InputTensor, from_bytes, parse_entries
from optimizer.options.run_options import RunOptions

MODELS = ("mlp", "dlrm", "text_recognition-small")  # their inputs may have any number
MEASURED_SECONDS = 0.2
COLUMNS = ("model", "batch", "CPU ms, perf_analyzer's request", "CPU ms, tune's requests", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--samples", type=int, default=16, help="samples of a batch (16)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    given = parser.parse_args()
    print_title("CPU time of random requests: latest measurement")
    print_head(*COLUMNS)
    for name in given.models:
        repeated, different = compare(name, given.samples, given.rounds)
        times = (f"{statistics.median(each):.3g}" for each in (repeated, different))
        print(row(name, str(given.samples), *times, ratio_interval(repeated, different).text(".2f")), flush=True)
    print("\n" + measured_on(f"medians of {given.rounds} rounds; onnxruntime {onnxruntime.__version__}"))


def compare(name: str, samples: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the CPU times in ms of a batch in each round: perf_analyzer's request repeated, and tune's requests."""
    prepared = prepare_model(RunOptions(name, input_data="random"))
    tensors = input_tensors(prepared.source)
    sent = list(parse_entries(prepared.input_data, tensors))
    different = [joined(sent[first : first + samples]) for first in range(0, len(sent) - samples + 1, samples)]
    repeated = [joined([any_bits(tensors)] * samples)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    (file,) = (prepared.source.repository / prepared.source.name).rglob("model.onnx")
    session = onnxruntime.InferenceSession(str(file), options)
    rows = [(cpu_ms(session, repeated), cpu_ms(session, different)) for _ in range(rounds)]
    return [first for first, _ in rows], [second for _, second in rows]


def input_tensors(source: ModelSource) -> list[InputTensor]:
    """Return the inputs of a reference model, whose types are numbers."""
    return [
        InputTensor(tensor.name, DataType.Name(tensor.data_type).removeprefix("TYPE_"), tuple(tensor.dims), True)
        for tensor in source.config.input
    ]


def any_bits(tensors: Sequence[InputTensor]) -> InputSample:
    """Return perf_analyzer's sample: each input has the first of the same bytes, which it draws without a seed."""
    sizes = [math.prod(tensor.dims) * tensor.dtype.itemsize for tensor in tensors]
    libc = ctypes.CDLL(None)
    libc.srand(1)
    drawn = bytes(libc.rand() & 0xFF for _ in range(max(sizes)))
    return {
        tensor.name: from_bytes(tensor.dtype, drawn[:size]).reshape(tensor.dims)
        for tensor, size in zip(tensors, sizes, strict=True)
    }


def joined(samples: Sequence[InputSample]) -> InputSample:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def cpu_ms(session: onnxruntime.InferenceSession, batches: Sequence[InputSample]) -> float:
    """Return the mean CPU time of an execution, over batches that are executed in turn."""
    for batch in batches:
        session.run(None, batch)
    count, start = 0, time.process_time()
    while time.process_time() - start < MEASURED_SECONDS:
        session.run(None, batches[count % len(batches)])
        count += 1
    return 1000 * (time.process_time() - start) / count


if __name__ == "__main__":
    main()
