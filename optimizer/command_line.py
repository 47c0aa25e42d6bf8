"""Options back to the command that gives them: what a result prints so that it can be reproduced."""

from __future__ import annotations

import re
import shlex
from decimal import Decimal
from urllib.parse import unquote

from optimizer.arguments.target import words as target_words
from optimizer.headers import HIDDEN
from optimizer.options import RunOptions, default_search

_PASSWORD = re.compile(r"://([^/:]*):(.*)@", re.DOTALL)


def command_line(options: RunOptions) -> str:
    """The ``tune`` command of these options: read again it gives the same ones.

    Defaults are left out, but for those that a file of Model Analyzer may have otherwise. A password is never shown,
    nor a header that is a secret.
    """
    default, whole = RunOptions(model=options.model), options.from_model_analyzer is not None
    words = ["tune"]
    for name, bound in options.sla_ms.items():
        words += [f"--sla-{name}", f"{_plain(bound)}ms"]
    flags = {
        "--objective": ",".join(options.objectives) if whole or options.objectives != default.objectives else None,
        "--min-throughput": options.min_throughput,
        "--max-memory": f"{_plain(options.max_memory_bytes)}B" if options.max_memory_bytes else None,
        "--min-score": _plain(options.min_score) if options.min_score is not None else None,
        "--confidence": f"{_plain(100 * options.confidence)}%" if options.confidence != default.confidence else None,
        "--model-repository": options.model_repository,
        "--bls-composing-models": ",".join(options.bls_composing_models) or None,
        "--concurrent-models": ",".join(options.concurrent_models) or None,
        "--variants": ",".join(options.variants) or None,
        "--from-model-analyzer": options.from_model_analyzer,
        **target_words(options),
        "--budget": f"{_plain(options.budget_seconds)}s"
        if options.budget_seconds != default.budget_seconds
        else None,
        "--max-trials": options.max_trials,
        "--search": options.search if options.search != default_search(options.objectives) else None,
        "--seed": options.seed,
        "--warm-start": options.warm_start,
        "--protocol": options.protocol if whole or options.protocol != default.protocol else None,
        "--measurement-interval": f"{_plain(options.measurement_interval_ms)}ms"
        if options.measurement_interval_ms
        else None,
        "--request-batch-size": options.request_batch_size,
        "--input-data": options.input_data,
        "--shape": options.shapes,
        "--input-range": options.ranges,
        "--string-data": options.string_data,
        "--string-length": options.string_length,
        "--load": options.load if whole or options.load != default.load else None,
        "--arrivals": options.arrivals
        if options.arrivals != default.arrivals or (whole and options.load == "rate")
        else None,
        "--server-cpus": options.server_cpus,
        "--client-cpus": options.client_cpus,
        "--storage": without_password(options.storage),
        "--join": options.join,
        "--out": options.out if options.out != default.out else None,
    }
    words += [] if options.output_check else ["--no-output-check"]
    words += ["--model-warmup"] if options.model_warmup else []
    for flag, given in flags.items():
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            words += [f"{flag}={value}"] if str(value).startswith("-") else [flag, str(value)]
    return shlex.join([*words, *(["--"] if options.model.startswith("-") else []), options.model])


def without_password(url: str | None) -> str | None:
    return None if url is None else redact(url)


def redact(text: str, url: str = "") -> str:
    """``text`` with the password of each URL in it replaced, whatever characters the password has; that of ``url``
    wherever it stands, also as a driver decodes it.

    A user name may have an @ of its own, as in ``user@tenant:password@host``.
    """
    given = _PASSWORD.search(url)
    for secret in {given[2], unquote(given[2])} if given and given[2] else ():
        text = text.replace(secret, HIDDEN)
    text = _PASSWORD.sub(rf"://\1:{HIDDEN}@", text)
    return re.sub(r"(?i)(password|passwd|pwd|secret|token)=[^&\s]*", rf"\1={HIDDEN}", text)


def _plain(number: float) -> str:
    """All digits, no exponent: what the parser of durations reads."""
    text = format(Decimal(repr(float(number))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
