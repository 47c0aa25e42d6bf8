"""The requests of a task: by the options of the command line, and by the profile where these say nothing."""

from __future__ import annotations

from collections.abc import Mapping

from optimizer.core.candidate import FieldChoices
from optimizer.core.errors import BadInputError, ParameterError
from optimizer.core.files import cache_folder
from optimizer.core.notes import WithoutBatches
from optimizer.core.request_sizes import (
    SizeDistribution,
    TokenRequests,
    parse_priorities,
    parse_size_distribution,
    parse_token_lengths,
)
from optimizer.core.safe_text import one_line, quote
from optimizer.measure.load_client.arrivals import Arrivals, RecordedArrivals
from optimizer.model.profile_schema import TokensSection
from optimizer.model.requests import InputOptionError, RequestBatching, RequestOptions, Requests, prepare_requests
from optimizer.options.run_options import RunOptions
from optimizer.options.values import parse_optional
from optimizer.study.model_finder import NamedModel
from optimizer.study.option_check import priorities_fault

DEFAULT_SEQUENCE_LENGTH = 20  # the default of perf_analyzer
NO_OPTIONS = RequestOptions()


def request_priorities(
    named: NamedModel,
    fields: FieldChoices,
    options: RunOptions,
    arrivals: Arrivals | None,
) -> SizeDistribution | None:
    """Return the shares of the priorities of the requests; None without any. ``fields`` are those that are tried.

    Raises BadInputError if the model lacks a priority, or if a trace has its own.
    """
    text = options.priorities or (named.profile.request.priorities if named.profile else None)
    if text is None:
        return None
    priorities = parse_priorities(text)
    fault = priorities_fault(priorities, named.source, fields)
    if isinstance(arrivals, RecordedArrivals) and arrivals.classes is not None:
        fault = f"the trace {arrivals.name} has the requests' own; leave the priorities out"
    if not fault:
        return priorities
    if named.profile and not options.priorities:
        raise named.profile.fault("request", "priorities", problem=fault)
    raise BadInputError(f"--priorities {fault}" if fault[0].isdigit() else f"--priorities: {fault}")


def sequence_lengths(named: NamedModel, options: RunOptions) -> SizeDistribution | None:
    """Return the distribution of the requests in a sequence; None if the model is not stateful.

    Raises BadInputError if a model that is not stateful is given one.
    """
    length = options.sequence_length or (named.profile.request.sequence_length if named.profile else None)
    if named.source.is_stateful:
        return parse_size_distribution(str(length or DEFAULT_SEQUENCE_LENGTH))
    if length is not None:
        problem = f"{named.source.name} is not stateful (no sequence_batching); leave it out"
        if named.profile and not options.sequence_length:
            raise named.profile.fault("request", "sequence_length", problem=problem)
        raise BadInputError(f"--sequence-length: {problem}")
    return None


def request_options(named: NamedModel, options: RunOptions) -> RequestOptions:
    """Return the options of the command line for requests, and those of the profile for the rest."""
    defaults = named.profile.request.options() if named.profile else NO_OPTIONS
    return RequestOptions(
        options.input_data or "", options.shapes, options.input_ranges, options.string_data, options.string_length
    ).over(defaults)


def make_requests(
    named: NamedModel, batching: RequestBatching, options: RequestOptions, tokens: TokenRequests | None
) -> Requests:
    """Return the requests by ``options`` and ``tokens``; without any, those of the model's builder."""
    source = named.source
    if source.input_data is not None and options == NO_OPTIONS and tokens is None:
        return Requests(source.input_data).limited(batching, cache_folder())
    try:
        ranges = source.index_ranges_of(source.name)
        return prepare_requests(options, source.config, batching, cache_folder(), tokens, ranges)
    except ParameterError as error:  # an input in the section tokens, which only a profile has
        assert named.profile is not None
        raise named.profile.fault("tokens", error.parameter, problem=error.problem) from None
    except BadInputError as error:
        located = _located(error, named) if isinstance(error, InputOptionError) else error
        if source.batch_obstacle is not None:  # the dims of each input then include its first one
            located.add_note(str(WithoutBatches(source.batch_obstacle)))
        raise located from None


def _located(error: InputOptionError, named: NamedModel) -> BadInputError:
    """Return the error with the line of the profile that has the option; as it is if the command line has it."""
    if named.profile is not None:
        request = named.profile.request
        given: Mapping[str, object] = request.shapes if error.kind == "shape" else request.ranges
        for names, value in given.items():
            if f"{names}:{value}" == error.text:
                return named.profile.fault("request", f"{error.kind}s", names, problem=error.problem)
    return error


def token_requests(named: NamedModel, requests: RequestOptions, options: RunOptions) -> TokenRequests | None:
    """Return the lengths of prompts and outputs by the command line, else by the profile.

    None if there are none, or if the prompts are recorded.
    """
    profile, section = named.profile, named.profile.tokens if named.profile else TokensSection()
    texts = {"--prompt-tokens": options.prompt_tokens, "--output-tokens": options.output_tokens}
    options_text = " ".join(f"{flag} {quote(text)}" for flag, text in texts.items() if text is not None)
    if not named.source.is_streaming:
        problem = f"{named.source.name} sends one response to a request; only a decoupled model generates tokens"
        if options_text:
            raise BadInputError(f"{options_text}: {problem} (model_transaction_policy in config.pbtxt); leave it out")
        if profile and section != TokensSection():
            raise profile.fault("tokens", problem=f"{problem}; leave the section out")
        return None
    outputs = [tensor.name for tensor in named.source.config.output]
    if profile and section.output_tensor and section.output_tensor not in outputs:
        problem = f"{section.output_tensor}: {named.source.name} has no such output; its outputs are"
        raise profile.fault("tokens", "output_tensor", problem=f"{problem} {one_line(', '.join(outputs), 200)}")
    if options_text and requests.is_recorded:
        raise BadInputError(
            f"{options_text}: the input data {quote(str(requests.input_data))} have prompts of their own; "
            "leave one out"
        )
    if requests.is_recorded:
        return None
    prompt, output = (parse_optional(flag, text, parse_token_lengths) for flag, text in texts.items())
    try:
        tokens = section.requests(prompt, output)
    except ValueError as error:
        raise BadInputError(f"{options_text}: {error}") from None
    if options_text and tokens is None:
        raise BadInputError(
            f"{options_text}: the inputs for the prompt and the number of tokens, or one of the lengths, are "
            "unknown; write a profile with tokens: {prompt_input: NAME, output_input: NAME} and give both lengths"
        )
    return tokens
