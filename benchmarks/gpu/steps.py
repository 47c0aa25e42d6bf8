"""The measurements of each GPU study, in full and as a smoke test, and their comparison with published results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from published import Row, published
from studies import BERT_STUDY, DLRM_STUDY, Study, batching

Command: TypeAlias = Literal["sweep", "run", "rounds"]

ONE_BY_ONE = "TorchScript FP16, one request at a time"
PRINTED = "TorchScript FP16 on V100"  # its label in the published study
RANDOM = "--input-data random"
# a request of 4,096 samples has 1 MB, so gRPC rather than the GPU would limit the throughput
SHARED = "--shared-memory system"


@dataclass(frozen=True)
class GpuStep:
    """Arguments of ``tune sweep``, of ``tune`` (``run``), or of plain_rounds.py for the last run (``rounds``).

    ``words`` are without the model or the run. ``smoke`` are those of the smoke test, or empty if the step is omitted
    there.
    """

    words: str
    smoke: str
    label: Callable[[Row], str]
    command: Command = "sweep"

    def arguments(self, *, smoke: bool) -> list[str]:
        """Return the arguments of the command, without the model or the run."""
        words = (self.smoke if smoke else self.words).split()
        if self.command == "rounds":
            return words
        return [*(["sweep"] if self.command == "sweep" else []), *words, *RANDOM.split()]


@dataclass(frozen=True)
class OnGpu:
    """A study on a GPU: the files of its results begin with ``name``, and its model is one of models.py.

    ``printed`` are the published results with the labels used here.
    """

    name: str
    model: str
    study: Study
    printed: Callable[[], list[Row]]
    steps: tuple[GpuStep, ...]

    def steps_of(self, *, smoke: bool) -> list[GpuStep]:
        """Return the steps of a run, which are fewer in the smoke test."""
        return [step for step in self.steps if step.smoke or not smoke]


def recommended(cell: Row) -> str:
    return f"tune: {cell['role']}"


def again(cell: Row) -> str:
    return f"perf_analyzer, plain servers: {cell['role'].replace('_', ' ')}"


def settings(cell: Row) -> str:
    return (
        f"max_batch_size {cell['max_batch_size']}, delay {cell['max_queue_delay_us']} µs, "
        f"{cell['instance_count']} instance{'s' if cell['instance_count'] > 1 else ''}"
    )


def _dlrm_printed() -> list[Row]:
    rows = [row for row in published(DLRM_STUDY.name) if row["label"] == PRINTED]
    return [row | {"label": ONE_BY_ONE} for row in rows]


def _bert_printed() -> list[Row]:
    return published(BERT_STUDY.name)


HERE = "TorchScript FP16 through tune's own Python-based PyTorch backend"
DLRM = OnGpu(
    "dlrm",
    "dlrm",
    replace(DLRM_STUDY, setup=f"DLRM of 32.7 million rows, {HERE}", ratios=()),
    _dlrm_printed,
    (
        GpuStep(
            "--max-queue-delay off -b 1,8,64,512,4096,32768,65536,131072 --concurrency 1",
            "--max-queue-delay off -b 1,64 --concurrency 1 --measurement-interval 100ms",
            lambda _: ONE_BY_ONE,
        ),
        GpuStep(
            "--max-batch-size 65536 --max-queue-delay off,0 -b 4096 --concurrency 1,2,4,8,16",
            "",
            batching,
        ),
        GpuStep(
            f"--sla-p95 20ms --request-batch-size 4096 {SHARED} --budget 300s --measurement-interval 200ms",
            f"--sla-p95 2s --request-batch-size 64 {SHARED} --budget 15s --measurement-interval 100ms",
            recommended,
            "run",
        ),
        GpuStep("--rounds 1 --seconds 3", "--rounds 1 --seconds 1", again, "rounds"),
    ),
)
BERT = OnGpu(
    "bert",
    "bert",
    replace(BERT_STUDY, setup=f"BERT Base, 128 tokens, {HERE}"),
    _bert_printed,
    (
        GpuStep(
            "--max-batch-size 8 --max-queue-delay off -b 1 --concurrency 1..64",
            "--max-batch-size 8 --max-queue-delay off -b 1 --concurrency 1 --measurement-interval 100ms",
            batching,
        ),
        GpuStep("--max-batch-size 8 --max-queue-delay off -b 8 --concurrency 1..8", "", batching),
        GpuStep(
            "--max-batch-size 8 --max-queue-delay 5ms --preferred-batch-size 4+8 -b 1 --concurrency 1..64",
            "",
            batching,
        ),
        GpuStep("--max-batch-size 8 --max-queue-delay off --instance-count 4 -b 1 --concurrency 1..64", "", batching),
        GpuStep(
            "--sla-p95 100ms --budget 120s --measurement-interval 200ms",
            "",
            recommended,
            "run",
        ),
        GpuStep("--rounds 3 --seconds 3", "", again, "rounds"),
    ),
)
BERT_TABLE = OnGpu(
    "bert-table",
    "bert",
    Study(
        name="bert-table",
        title="BERT: a table of 24 configurations at 4 loads",
        there="",
        source="",
        url="",
        setup=f"BERT Base, 128 tokens, {HERE}; `tune replay` reads its trials.csv",
        point="",
        steps=(),
    ),
    list,
    (
        GpuStep(
            "--max-batch-size 8,16,32,64 --max-queue-delay 0,1ms,5ms --instance-count 1,2 --concurrency 8,32,64,128 "
            "--measurement-interval 200ms",
            "--max-batch-size 4,8 --max-queue-delay 0,1ms --concurrency 2,4 --measurement-interval 100ms",
            settings,
        ),
    ),
)
STUDIES = {study.name: study for study in (DLRM, BERT, BERT_TABLE)}
# A GPU adds in another order for another batch size, which changes the outputs of FP16
ROUNDING = "tolerance: {relative: 0.02}"
PROFILES = {  # profiles of the `tune` steps
    "dlrm": "space: {max_batch_size: [4096, 16384, 65536], max_queue_delay_microseconds: [off, 0, 1000], "
    f"instance_group_count: [1, 2]}}\n{ROUNDING}",
    "bert": "space: {max_batch_size: [1, 8, 16, 64], max_queue_delay_microseconds: [off, 0, 1000, 5000], "
    f"instance_group_count: [1, 2, 4]}}\n{ROUNDING}",
}
