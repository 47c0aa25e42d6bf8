"""The INT8 variant of a built model: ONNX Runtime's dynamic quantization of its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from optimizer.config import model_config
from optimizer.core.files import cache_folder
from optimizer.model.builders import build

NAME = "bert_mini_int8"


def profile(of: Path, folder: Path) -> Path:
    """Return a profile of the quantized model of the profile ``of``. Both are written into ``folder`` if missing."""
    path = folder / f"{NAME}.yaml"
    if path.exists():
        return path
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = yaml.safe_load(of.read_text())["model"]
    source = build(
        model["builder"],
        model["settings"],
        cache=cache_folder(),
        max_batch_size=8,
        kind="KIND_CPU",
        on_progress=print,
    )
    version = folder / "models" / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    whole = source.repository / source.name / "1" / "model.onnx"
    quantize_dynamic(whole, version / "model.onnx", weight_type=QuantType.QInt8)
    config = type(source.config)()
    config.CopyFrom(source.config)
    config.name = NAME
    (version.parent / "config.pbtxt").write_text(model_config.to_text(config))
    assert source.input_data is not None, "a model of tokens has data of its own"
    shutil.copyfile(source.input_data, folder / "input_data.json")
    profile = {
        "model": {"repository": "models", "name": NAME},
        "request": {"input_data": "input_data.json"},
        "space": {"max_batch_size": [8]},
    }
    path.write_text(yaml.safe_dump(profile, sort_keys=False))
    return path
