"""The studies of the documents: their subject and the commands that repeat them here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from published import Row

Figure = Literal["throughput_infer_per_sec", "latency_p95_ms", "latency_avg_ms", "compute_infer_ms"]


@dataclass(frozen=True)
class Step:
    """One command: ``command`` is ``tune sweep`` or ``tune``; ``fastapi`` is ``fastapi_baseline.py``.

    The last of ``words`` is the model: a file in profiles/ without its extension, or a name that ``tune`` knows.
    ``label`` names a cell's row.
    """

    command: Literal["sweep", "run", "fastapi"]
    words: str
    label: Callable[[Row], str]
    needs_gpu: bool = False


@dataclass(frozen=True)
class Ratio:
    """The ratio of ``figure`` of the cells labeled ``over`` and ``under``.

    They are compared at ``at`` (batch size, concurrency), or else each at its best. ``said`` is shown as the
    published ratio if the document prints no numbers for it.
    """

    name: str
    over: str
    under: str
    over_at: tuple[int, int] | None = None
    under_at: tuple[int, int] | None = None
    figure: Figure = "throughput_infer_per_sec"
    said: str = ""


@dataclass(frozen=True)
class Study:
    """A study: ``there`` is the document's set-up, ``setup`` the one used here, ``point`` the document's result.

    ``source`` is the public document, at ``url``; later versions of it may have other values.
    """

    name: str
    title: str
    there: str
    source: str
    url: str
    setup: str
    point: str
    steps: tuple[Step, ...]
    ratios: tuple[Ratio, ...] = ()
    remarks: tuple[str, ...] = ()


def batching(cell: Row) -> str:
    """Return a text such as ``dynamic · 2 instances``."""
    count = cell["instance_count"]
    kind = "dynamic" if cell["dynamic_batching"] else "static"
    return f"{kind} · {count} instance{'s' if count > 1 else ''}"


def called(name: str) -> Callable[[Row], str]:
    return lambda _: name


def with_setting(path: str, name: str) -> Callable[[Row], str]:
    def label(cell: Row) -> str:
        return f"{name}{cell[path]}"

    return label


NVIDIA = "https://github.com/NVIDIA/DeepLearningExamples/tree/master"
INFINITY = "ELS-RD transformer-deploy, demo/infinity"
INFINITY_URL = "https://github.com/ELS-RD/transformer-deploy/tree/main/demo/infinity"
GRAPH_LEVEL = "optimization.graph.level"
THREADS = "parameters.intra_op_thread_count.string_value"
KIND = "instance_group.0.kind"
BERT = "--max-batch-size 8 --measurement-interval 500ms"
RESNEXT = (
    "--max-batch-size 64 --max-queue-delay 0 --preferred-batch-size 32+64 --instance-count 2 --concurrency 1..256"
)
ON_CPU, AS_GIVEN, RECOMMENDED = "ONNX FP32 on CPU", "as given", "recommended"
STATIC, DYNAMIC, TWO_DYNAMIC = "static · 1 instance", "dynamic · 1 instance", "dynamic · 2 instances"
FP32, INT8 = "FP32, threads 2", "INT8 (dynamic quantisation)"
OFF_DLRM, ON_DLRM = "static, batches of up to 64", "dynamic, batches of up to 64"
ALONE = (1, 1)

BERT_STUDY = Study(
    name="bert",
    title="BERT: batch size, static against dynamic batching, one engine against four",
    there="BERT Base FP16, 128 tokens, TensorFlow on one V100 32GB",
    source="NVIDIA DeepLearningExamples, TensorFlow/LanguageModeling/BERT",
    url=f"{NVIDIA}/TensorFlow/LanguageModeling/BERT/triton",
    setup="BERT mini (4 layers of 256) FP32, 128 tokens, ONNX Runtime",
    point="with equally many samples in flight, requests of 8 have 4.3 times the throughput of requests of 1; "
    "dynamic batching has a higher throughput than static batching, but with few requests in flight each "
    "waits for the queue delay; more engines do not help a model that fills the device",
    steps=(
        Step("sweep", f"{BERT} --max-queue-delay off -b 1 --concurrency 64 bert_mini", batching),
        Step("sweep", f"{BERT} --max-queue-delay off -b 8 --concurrency 1..8 bert_mini", batching),
        Step(
            "sweep",
            f"{BERT} --max-queue-delay off,5ms --preferred-batch-size 4+8 --concurrency 1..32 bert_mini",
            batching,
        ),
        Step("sweep", f"{BERT} --max-queue-delay off --instance-count 4 --concurrency 1..32 bert_mini", batching),
    ),
    ratios=(
        Ratio("requests of 8 over requests of 1, 64 samples in flight", STATIC, STATIC, (8, 8), (1, 64)),
        Ratio("compute time of a batch of 8 over one of 1", STATIC, STATIC, (8, 8), (1, 64), "compute_infer_ms"),
        Ratio("dynamic over static, 32 requests of 1", DYNAMIC, STATIC, (1, 32), (1, 32), said="a plot: higher"),
        Ratio("4 instances over 1", "static · 4 instances", STATIC, (1, 32), (1, 32), said="a plot: negligible"),
    ),
)

RESNEXT_STUDY = Study(
    name="resnext",
    title="ResNeXt101-32x4d: concurrency from 1 to 256, FP32 and FP16",
    there="ResNeXt101-32x4d, images of 224 x 224, TensorRT on one V100 16GB",
    source="NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets, ResNeXt101-32x4d",
    url=f"{NVIDIA}/PyTorch/Classification/ConvNets/triton/resnext101-32x4d",
    setup="ResNeXt50-32x4d, images of 64 x 64, ONNX Runtime",
    point="with dynamic batching throughput grows ten- to fifteenfold from 1 to 256 concurrent requests; FP16 has "
    "twice the throughput of FP32",
    steps=(
        Step("sweep", f"{RESNEXT} resnext50", called("FP32")),
        Step("sweep", f"{RESNEXT} resnext50_fp16", called("FP16")),
    ),
    ratios=(
        Ratio("FP32: 256 requests in flight over 1", "FP32", "FP32", (1, 256), ALONE),
        Ratio("FP16: 256 requests in flight over 1", "FP16", "FP16", (1, 256), ALONE),
        Ratio("FP16 over FP32, each at its best", "FP16", "FP32"),
    ),
    remarks=("on a CPU without FP16 arithmetic ONNX Runtime computes FP16 in FP32 between casts",),
)

DLRM_STUDY = Study(
    name="dlrm",
    title="DLRM: throughput by request batch size, then dynamic batching within 20 ms",
    there="DLRM of 32.7 million rows, on one V100-32G and on two E5-2698 v4 (40 cores)",
    source="NVIDIA DeepLearningExamples, PyTorch/Recommendation/DLRM",
    url=f"{NVIDIA}/PyTorch/Recommendation/DLRM/triton",
    setup="DLRM with at most 100,000 rows a table, FP32, ONNX Runtime",
    point="throughput grows with the request size until the device is full, then only latency grows; within 20 ms a "
    "V100 serves 1,776,030 recommendations a second, with 8 requests of 4096 in flight",
    steps=(
        Step(
            "sweep",
            "--max-batch-size 512 --max-queue-delay off -b 1,8,64,512 --concurrency 1 dlrm",
            called(ON_CPU),
        ),
        # perf_analyzer prepares all requests first, so tune sends 128 of the 8,191 samples in requests of 4096, and
        # in all requests of the same sweep. A window of 10 s has about 80 requests.
        Step(
            "sweep",
            "--max-batch-size 4096 --max-queue-delay off -b 4096 --concurrency 1 --measurement-interval 10s dlrm",
            called(ON_CPU),
        ),
        Step(
            "sweep",
            "--max-batch-size 64 --max-queue-delay off,0 -b 4 --concurrency 1..64 dlrm",
            lambda cell: ON_DLRM if cell["dynamic_batching"] else OFF_DLRM,
        ),
    ),
    ratios=(
        Ratio("requests of 512 over requests of 1", ON_CPU, ON_CPU, (512, 1), ALONE),
        Ratio("requests of 4096 over requests of 512", ON_CPU, ON_CPU, (4096, 1), (512, 1)),
        Ratio(
            "dynamic over static, 64 requests of 4",
            ON_DLRM,
            OFF_DLRM,
            (4, 64),
            (4, 64),
            said="a plot",
        ),
    ),
)

LATENCY_STUDY = Study(
    name="minilm",
    title="MiniLM: the lowest latency of one request",
    there="MiniLM-L6-H384, TensorRT FP16 on one T4, one request at a time, the tokenizer included",
    source=INFINITY,
    url=INFINITY_URL,
    setup="MiniLM-L6-H384 FP32, ONNX Runtime, one request at a time, tokens as input",
    point="Triton answers a sentence of 16 tokens in 1.5 ms, one of 128 in 2 ms",
    steps=(
        Step("run", "--objective latency-p95 --budget 60s minilm_16", lambda cell: f"16 tokens · {cell['role']}"),
        Step("run", "--objective latency-p95 --budget 60s minilm_128", lambda cell: f"128 tokens · {cell['role']}"),
    ),
    ratios=(
        Ratio(
            "latency of 128 tokens over 16",
            f"128 tokens · {AS_GIVEN}",
            f"16 tokens · {AS_GIVEN}",
            figure="latency_avg_ms",
        ),
        *(
            Ratio(
                f"{tokens} tokens: p95 recommended over as given",
                f"{tokens} tokens · {RECOMMENDED}",
                f"{tokens} tokens · {AS_GIVEN}",
                figure="latency_p95_ms",
                said="not tried",
            )
            for tokens in (16, 128)
        ),
    ),
)

FASTAPI_STUDY = Study(
    name="minilm-fastapi",
    title="MiniLM: a plain FastAPI and ONNX Runtime server compared with Triton",
    there="FastAPI with ONNX Runtime on one T4, 50 requests by curl, including the start of curl and the tokenizer",
    source=INFINITY,
    url=INFINITY_URL,
    setup="MiniLM-L6-H384 FP32 on both servers, tokens as JSON",
    point="FastAPI took 12.4 ms a sentence, including curl, and Triton 1.5 ms with its own client",
    steps=(Step("fastapi", "", lambda cell: str(cell["label"])),),
    ratios=tuple(
        Ratio(
            f"{tokens} tokens, {concurrency} in flight: Triton{how} over FastAPI",
            f"Triton{how} · {tokens} tokens",
            f"FastAPI · {tokens} tokens",
            (1, concurrency),
            (1, concurrency),
            said="not printed",
        )
        for tokens in (16, 128)
        for concurrency, how in ((1, ""), (8, ""), (8, ", dynamic batching"))
    ),
)

VARIANTS_STUDY = Study(
    name="minilm-variants",
    title="Variants of one model compared: FP32, FP16, INT8, settings of ONNX Runtime",
    there="MiniLM-L6-H384, one request of 128 tokens at a time, in process on one T4",
    source=INFINITY,
    url=INFINITY_URL,
    setup="BERT mini (4 layers of 256), 128 tokens, one and four requests at a time through Triton",
    point="the optimised ONNX Runtime model takes less than half the time of the plain one, a seventh of PyTorch's",
    steps=(
        Step(
            "sweep",
            f"--config {GRAPH_LEVEL}=2,0 --concurrency 1,4 bert_mini",
            with_setting(GRAPH_LEVEL, "FP32, graph level "),
        ),
        Step("sweep", f"--config {THREADS}=1,2 --concurrency 1,4 bert_mini", with_setting(THREADS, "FP32, threads ")),
        Step("sweep", "--concurrency 1,4 bert_mini_fp16", called("FP16")),
        Step("sweep", "--concurrency 1,4 bert_mini_int8", called(INT8)),
        Step(
            "sweep",
            f"--config {KIND}=KIND_CPU,KIND_GPU --concurrency 1,4 bert_mini",
            with_setting(KIND, "FP32, "),
            needs_gpu=True,
        ),
    ),
    ratios=(
        Ratio(
            "all graph optimisations (level 0) over none (2)",
            "FP32, graph level 0",
            "FP32, graph level 2",
            ALONE,
            ALONE,
            said="2.29x (1.67 ms over 0.73 ms)",
        ),
        Ratio("INT8 over FP32", INT8, FP32, ALONE, ALONE, said="not tried"),
        Ratio("FP16 over FP32", "FP16", FP32, ALONE, ALONE, said="see ResNeXt"),
        Ratio("2 threads over 1", FP32, "FP32, threads 1", ALONE, ALONE, said="not tried"),
    ),
    remarks=("on a CPU without FP16 arithmetic ONNX Runtime computes FP16 in FP32 between casts",),
)

TEXT_STUDY = Study(
    name="text_recognition",
    title="Text recognition: dynamic batching, then two instances",
    there="text recognition of 512 features on one A100, requests of 2, max_batch_size 8",
    source="Triton tutorials, Conceptual Guide part 2",
    url="https://github.com/triton-inference-server/tutorials/tree/main/Conceptual_Guide/"
    "Part_2-improving_resource_utilization",
    setup="text recognition of 128 features, ONNX Runtime, requests of 2, max_batch_size 8, one thread an instance, "
    "so one instance leaves CPUs for another, as on the A100",
    point="dynamic batching has 3.3 times the throughput at a third of the latency; a second instance multiplies "
    "the throughput by another 1.3",
    steps=(
        Step(
            "sweep",
            f"--max-batch-size 8 --max-queue-delay off,0 --instance-count 1,2 --config {THREADS}=1 -b 2 "
            "--concurrency-range 2:16:2 --measurement-interval 800ms text_recognition",
            batching,
        ),
    ),
    ratios=(
        Ratio("dynamic over static, each at its best", DYNAMIC, STATIC),
        Ratio("2 instances over 1, both dynamic, each at its best", TWO_DYNAMIC, DYNAMIC),
        Ratio("p95 at 16 in flight: static over dynamic", STATIC, DYNAMIC, (2, 16), (2, 16), "latency_p95_ms"),
    ),
)

STUDIES = {
    study.name: study
    for study in (
        BERT_STUDY,
        RESNEXT_STUDY,
        DLRM_STUDY,
        LATENCY_STUDY,
        FASTAPI_STUDY,
        VARIANTS_STUDY,
        TEXT_STUDY,
    )
}
