"""Refuse options that contradict each other, or that need another one that is missing."""

from __future__ import annotations

from collections.abc import Collection

from optimizer.core.endpoint import ProtocolName
from optimizer.core.safe_text import quote
from optimizer.options.addresses import DEFAULT_URL, SSL_FLAGS, server_address
from optimizer.options.run_options import (
    EXHAUSTIVE_SEARCHES,
    PROGRAM_TARGETS,
    SEARCHERS,
    SIMULATED_OBJECTIVES,
    RunOptions,
)
from optimizer.options.table import OPTIONS_BY_NAME, REQUEST_TIME_OPTIONS, TARGET_OPTIONS
from optimizer.options.values import MAX_INT32, OptionError, format_number


def check_options(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if options contradict each other."""
    _check_load(options, explicit)
    check_target_options(options, explicit)
    _check_remote(options)
    _check_shared_memory(options)
    _check_search(options)
    check_cluster(options)
    if options.study_name is not None and options.storage is None:
        raise option_fault("study-name", "--storage is missing; give the database of all workers", options.study_name)


def check_target_options(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if an option does not belong to the target, or needs another option that is missing."""
    if misplaced := misplaced_option(options, explicit):
        raise _requires(*misplaced)
    _check_ssl(options, explicit)
    if options.target == "docker" and options.docker_image is None:
        image = "nvcr.io/nvidia/tritonserver:…-py3"
        raise option_fault("target", f"--docker-image is missing; give an image such as {image}", "docker")


def misplaced_option(options: RunOptions, explicit: Collection[str]) -> tuple[str, str, str] | None:
    """Return the name and value of an option that does not belong to the target, and the targets that take it."""
    for option in TARGET_OPTIONS:
        if option.name in explicit and options.target not in option.targets:
            value = option.value_in(options)
            if option.repeatable and not value:
                continue  # an empty list in Python or in a suite
            shown = option.redact(value[0] if option.repeatable else value)
            return option.name, shown, f"--target {' or '.join(option.targets)}"
    return None


def option_fault(name: str, problem: str, value: str | None = None) -> OptionError:
    """Return the error about the option ``name``, which begins with its flag and the ``value``, if that matters."""
    shown = f"--{name}" if value is None else f"--{name} {quote(value)}"
    return OptionError(name, f"{shown}: {problem}")


def _requires(name: str, value: str, other: str) -> OptionError:
    """Return the error about an option that has no effect without the option ``other``."""
    return option_fault(name, f"works only with {other}; add {other}, or remove --{name}", value)


def _check_ssl(options: RunOptions, explicit: Collection[str]) -> None:
    """Raise OptionError if a PEM file is of the other protocol than ``--url``, lacks its key, or has no effect."""
    address, url = server_address(options.url), quote(options.url or DEFAULT_URL)
    flags = SSL_FLAGS[address.protocol]
    other_protocol: ProtocolName = "grpc" if address.protocol == "http" else "http"
    for name, flag in SSL_FLAGS[other_protocol].items():
        if flag[2:] in explicit:
            problem = f"--url {url} does not begin with {other_protocol}s://"
            raise option_fault(flag[2:], f"{problem}; begin the URL with {other_protocol}s://, or give {flags[name]}")
    files = {"ca": options.tls_ca, "cert": options.tls_cert, "key": options.tls_key}
    set_flags = [flags[name] for name, file in files.items() if file is not None]
    if (flags["cert"] in set_flags) != (flags["key"] in set_flags):
        present, missing = ("key", "cert") if options.tls_cert is None else ("cert", "key")
        raise option_fault(flags[present][2:], f"a client certificate needs its key; give {flags[missing]} too")
    if set_flags and not address.tls:
        raise option_fault(set_flags[0][2:], f"--url {url} is not encrypted; begin it with {address.protocol}s://")


def _check_load(options: RunOptions, explicit: Collection[str]) -> None:
    timing = [name for name in REQUEST_TIME_OPTIONS if name in explicit]
    if len(timing) > 1:
        both = " and ".join(f"--{name}" for name in timing)
        raise OptionError(timing[0], f"{both} both set the times of the requests: give one of them")
    if options.load != "rate":
        if timing:
            raise _requires(timing[0], options.request_times, "--load rate")
        return
    if options.protocol == "http":
        why = "requests at a rate are sent over gRPC only"
        if "protocol" in explicit:
            raise option_fault("protocol", f"{why}; leave it out", "http")
        raise option_fault("url", f"{why}; give the host:port of its gRPC", options.url or DEFAULT_URL)
    if options.perf_analyzer_image is not None:
        problem = "perf_analyzer does not send requests at a rate; leave it out"
        raise option_fault("perf-analyzer-image", problem, options.perf_analyzer_image)


def _check_remote(options: RunOptions) -> None:
    if options.target != "remote":
        return
    if options.protocol != server_address(options.url).protocol:
        advice = "a gRPC address; give http://host:port"
        if options.protocol == "grpc":
            advice = "an HTTP address; give the host:port of its gRPC"
        raise option_fault("protocol", f"--url is {advice}", options.protocol)
    if options.server_cpus is not None:
        raise option_fault(
            "server-cpus", "the CPUs of a remote server cannot be set; leave it out", options.server_cpus
        )


def _check_shared_memory(options: RunOptions) -> None:
    size = options.output_shared_memory_bytes
    if options.shared_memory == "none":
        if size is not None:
            needed = "--shared-memory system or cuda"
            raise _requires("output-shared-memory-size", f"{format_number(size)}B", needed)
        return
    if size is not None and not 1 <= size <= MAX_INT32:
        raise option_fault("output-shared-memory-size", "write 1B to 2GiB", f"{format_number(size)}B")
    if options.shared_memory == "cuda" and options.load == "rate":
        problem = "tune's own client, which sends at a rate, has system shared memory only; use that"
        raise option_fault("shared-memory", problem, options.shared_memory)
    if options.perf_analyzer_image is not None:
        problem = "a perf_analyzer in a container does not share the memory; leave --perf-analyzer-image out"
        raise option_fault("shared-memory", problem, options.shared_memory)
    if options.docker_shm_size is not None:
        problem = "the container then has the shared memory of this machine; leave --docker-shm-size out"
        raise OptionError("docker-shm-size", f"--shared-memory {options.shared_memory}: {problem}")


def _check_search(options: RunOptions) -> None:
    if options.search == "simulated" and options.objectives[0] not in SIMULATED_OBJECTIVES:
        *alternatives, last = (name for name in SEARCHERS if name != "simulated")
        raise OptionError(
            "search",
            f"--search simulated ranks by throughput or goodput; with --objective {','.join(options.objectives)} "
            f"take {', '.join(alternatives)} or {last}",
        )
    if options.search in EXHAUSTIVE_SEARCHES and options.warm_start is not None:
        problem = f"--search {options.search} measures every configuration anyway; leave one of the two out"
        raise option_fault("warm-start", problem)


def check_cluster(options: RunOptions) -> None:
    """Raise OptionError if an option does not fit a Ray cluster, or needs one."""
    if options.cluster is None:
        if options.cluster_cpus is not None:
            raise _requires("cluster-cpus", str(options.cluster_cpus), "--cluster")
        return
    if options.target not in PROGRAM_TARGETS:
        problem = f"each trial starts its own server, which --target {options.target} does not"
        raise option_fault("cluster", f"{problem}; take {' or '.join(PROGRAM_TARGETS)}")
    if options.study_name is not None:
        raise OptionError("cluster", "--cluster runs the trials of one study in parallel: leave --study-name out")
    for name in ("server-cpus", "client-cpus", "perf-analyzer-image"):
        if OPTIONS_BY_NAME[name].value_in(options) is not None:
            reason = (
                "uses tune's own perf_analyzer" if name == "perf-analyzer-image" else "gets free CPUs of its node"
            )
            raise option_fault(name, f"a trial on a cluster {reason}: leave it out")
