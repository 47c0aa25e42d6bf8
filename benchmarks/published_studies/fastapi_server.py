"""The baseline of the study minilm-fastapi: a model of tokens behind FastAPI and ONNX Runtime.

    TRITUNE_BASELINE_MODEL=…/model.onnx python -m uvicorn --log-level warning fastapi_server:app

``POST /predict`` takes the three inputs of one request as JSON, lists of integers, and returns the logits.
"""

from __future__ import annotations

import os

import numpy as np
import onnxruntime
from fastapi import FastAPI
from pydantic import BaseModel

session = onnxruntime.InferenceSession(os.environ["TRITUNE_BASELINE_MODEL"])


class Tokens(BaseModel):
    input_ids: list[int]
    token_type_ids: list[int]
    attention_mask: list[int]


def predict(tokens: Tokens) -> list[float]:
    """Return the logits. FastAPI runs it in a thread pool, as it is not async, so requests run in parallel."""
    feed = {name: np.array([values], np.int32) for name, values in tokens}
    logits = session.run(["output"], feed)[0]
    return [float(logit) for logit in logits[0]]


app = FastAPI()
app.add_api_route("/predict", predict, methods=["POST"])
