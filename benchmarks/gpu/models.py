"""Write a model of the two GPU studies (DLRM and BERT question answering) by PyTorch into a Triton repository.

    python benchmarks/gpu/models.py [--tiny] dlrm|bert REPOSITORY

run.py starts this as a process of its own, so that no memory of the GPU stays allocated during the measurements.
Weights are random, which does not affect the speed. Integers are taken modulo the rows of their table, so that
random requests are valid.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

CRITEO = (  # rows of the 26 tables, as published (at least 15 occurrences)
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968),
    *(15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
# otherwise the first measurements include the compilation of a graph for each batch size
PARAMETERS = {"ENABLE_JIT_PROFILING": "false", "ENABLE_TENSOR_FUSER": "false"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models. ``rows`` is the maximum of a table; ``half`` selects FP16 instead of FP32."""

    rows: int
    top: tuple[int, ...]
    layers: int
    hidden: int
    heads: int
    tokens: int
    half: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


AS_PUBLISHED = Sizes(max(CRITEO), (1024, 1024, 512, 256), layers=12, hidden=768, heads=12, tokens=128, half=True)
TINY = Sizes(100, (32,), layers=2, hidden=32, heads=2, tokens=16, half=False)


class EmbeddingTable(nn.Module):  # type: ignore[misc]
    """Embeddings of 128 numbers, drawn at random whenever the model is loaded, and always the same ones.

    The file of the model does not have them: writing and reading 8.4 GB would take most of the time on the GPU. They
    are drawn on the device to which the model is loaded, that of ``like``, which also has their type.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("like", torch.zeros(1))
        self.weight = torch.empty(0)

    def forward(self, rows: Tensor) -> Tensor:
        return embedding(rows, self.weight)

    @torch.jit.export  # type: ignore[untyped-decorator]
    def __getstate__(self) -> tuple[int, Tensor, bool]:
        return self.rows, self.like, self.training

    @torch.jit.export  # type: ignore[untyped-decorator]
    def __setstate__(self, state: tuple[int, Tensor, bool]) -> None:
        self.rows, self.like, self.training = state
        torch.manual_seed(0)  # all instances and servers need the same outputs
        weight = torch.empty([self.rows, 128], dtype=self.like.dtype, device=self.like.device)
        self.weight = weight.normal_(0.0, 0.05)


class Dlrm(nn.Module):  # type: ignore[misc]
    """[n, 13] numbers and [n, 26] categories -> [n, 1] logits. All embedding tables are one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        rows = torch.tensor([min(count, sizes.rows) for count in CRITEO])
        self.register_buffer("rows", rows)
        self.register_buffer("offsets", torch.cumsum(rows, 0) - rows)
        self.table = EmbeddingTable(int(rows.sum()))
        self.bottom = _perceptron(13, (512, 256, 128))
        self.top = nn.Sequential(_perceptron(480, sizes.top), nn.Linear(sizes.top[-1], 1))
        below = torch.tril_indices(27, 27, -1)
        self.register_buffer("pairs", below[0] * 27 + below[1])

    def forward(self, input__0: Tensor, input__1: Tensor) -> Tensor:
        dense = self.bottom(input__0.to(self.table.like.dtype))
        looked_up = self.table(torch.remainder(input__1, self.rows) + self.offsets)
        vectors = torch.cat([dense.unsqueeze(1), looked_up], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([dense, products, torch.zeros_like(dense[:, :1])], 1)).float()


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, tokens, hidden = x.shape
        q, k, v = self.qkv(x).view(n, tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(n, tokens, hidden)
        x = self.first(x + self.out(seen))
        return self.second(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Bert(nn.Module):  # type: ignore[misc]
    """Token ids, segment ids and mask, each [n, tokens] -> logits of an answer's start and end."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(30522, sizes.hidden), nn.Embedding(2, sizes.hidden)
        self.positions = nn.Parameter(torch.randn(sizes.tokens, sizes.hidden))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes.hidden, sizes.heads) for _ in range(sizes.layers))
        self.ends = nn.Linear(sizes.hidden, 2)

    def forward(self, input__0: Tensor, input__1: Tensor, input__2: Tensor) -> tuple[Tensor, Tensor]:
        words = self.words(torch.remainder(input__0, 30522)) + self.segments(torch.remainder(input__1, 2))
        x = self.norm(words + self.positions)
        hidden = torch.remainder(input__2, 2).to(x.dtype).sub(1).mul(1e4)  # 0: the mask excludes the token
        for layer in self.layers:
            x = layer(x, hidden[:, None, None, :])
        start, end = self.ends(x).float().unbind(2)
        return start, end


def write_dlrm(repository: Path, sizes: Sizes) -> None:
    inputs = [("input__0", "TYPE_FP32", 13), ("input__1", "TYPE_INT64", 26)]
    _write(repository / "dlrm", Dlrm(sizes), sizes, 131072, inputs, [("output__0", "TYPE_FP32", 1)])


def write_bert(repository: Path, sizes: Sizes) -> None:
    tokens = [(f"input__{i}", "TYPE_INT32", sizes.tokens) for i in range(3)]
    ends = [(f"output__{i}", "TYPE_FP32", sizes.tokens) for i in range(2)]
    _write(repository / "bert", Bert(sizes), sizes, 64, tokens, ends)


MODELS = {"dlrm": write_dlrm, "bert": write_bert}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="write a tiny model in FP32, for the smoke test")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("repository", type=Path)
    arguments = parser.parse_args()
    MODELS[arguments.model](arguments.repository, TINY if arguments.tiny else AS_PUBLISHED)


def _write(
    folder: Path,
    model: nn.Module,
    sizes: Sizes,
    max_batch_size: int,
    inputs: list[tuple[str, str, int]],
    outputs: list[tuple[str, str, int]],
) -> None:
    """Write a model with an instance kind: without one, a server whose CUDA fails would serve it on the CPU."""
    kind = "KIND_GPU" if sizes.device == "cuda" else "KIND_CPU"
    lines = ['backend: "pytorch"', f"max_batch_size: {max_batch_size}", f"instance_group {{ kind: {kind} }}"]
    for kind, tensors in (("input", inputs), ("output", outputs)):
        lines += [f'{kind} {{ name: "{name}" data_type: {data} dims: {dims} }}' for name, data, dims in tensors]
    lines += [f'parameters {{ key: "{key}" value {{ string_value: "{it}" }} }}' for key, it in PARAMETERS.items()]
    (folder / "1").mkdir(parents=True, exist_ok=True)
    torch.jit.script(model.eval().to(sizes.device, sizes.dtype)).save(str(folder / "1" / "model.pt"))
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")


def _perceptron(inputs: int, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


if __name__ == "__main__":
    main()
