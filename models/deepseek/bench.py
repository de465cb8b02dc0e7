"""Latency and throughput of offline generation: requests, when each of their tokens came, and the figures made of that.

All requests are there from the start. What counts as output is the ids that the model generated, up to the end of each
sequence, once for all ranks; times are divided by how many there really were, not by how many were asked for.
"""

import csv
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from moe_int8.models.deepseek.generate import Completion, Watch
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.untrusted import read_text, shown

PERCENTILES = (50, 75, 95, 99)
TRACE_COLUMNS = ("ContextTokens", "GeneratedTokens")  # as in the Azure LLM inference traces
MAX_LENGTH = 2**20  # tokens; beyond every model's context


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and by how many at most."""

    prompt: list[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Served:
    """A request that was answered; `token_times` are seconds from the start of the run, one for each token."""

    input_tokens: int
    token_times: list[float]

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the next."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def time_per_token(self) -> float:
        """Mean seconds for a token behind the first; there must be one."""
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)


@dataclass(frozen=True)
class Run:
    """A measured run: what was answered, what failed and why, and the seconds for all of it, without the warm-up."""

    served: list[Served]
    failures: list[str]
    seconds: float
    warmup_requests: int


class Generates(Protocol):
    """The part of `Generator` that is measured."""

    max_model_len: int

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, watch: Watch | None = None
    ) -> list[Completion]: ...


def read_trace(path: Path, most: int) -> list[tuple[int, int]]:
    """The (input, output) lengths of the first `most` requests of a CSV with the columns TRACE_COLUMNS.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no CSV in UTF-8, a column is missing, a length is not a number from 1 to MAX_LENGTH, or there
            are no requests; names the line.
    """
    lengths = []
    reader = csv.DictReader(read_text(path).splitlines())
    try:
        missing = [name for name in TRACE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]}; a trace has {' and '.join(TRACE_COLUMNS)}")
        for row in islice(reader, most):
            values = [row[name] or "" for name in TRACE_COLUMNS]
            if not all(value.isdecimal() and 1 <= int(value[:9]) <= MAX_LENGTH for value in values):
                raise ValueError(
                    f"{path}, line {reader.line_num}: expected two lengths from 1 to {MAX_LENGTH}, got {shown(values)}"
                )
            lengths.append((int(values[0]), int(values[1])))
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV: {error}") from error
    if not lengths:
        raise ValueError(f"{path} holds no requests")
    return lengths


def random_requests(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int) -> list[Request]:
    """Requests of the given (input, output) lengths with random token ids; a seed gives the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(torch.randint(vocab_size, (inputs,), generator=generator).tolist(), outputs)
        for inputs, outputs in lengths
    ]


def measure(
    generator: Generates,
    requests: Sequence[Request],
    params: SamplingParams,
    *,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Generate for the first `warmup` requests, which does not count, then for all. Called on all ranks.

    A request whose prompt does not fit fails alone; logits that are not numbers fail all requests.

    Args:
        generator: its token times are those of `clock`.
        params: for all requests; each has its own `max_new_tokens`.
    """
    fitting = [request for request in requests if len(request.prompt) < generator.max_model_len]
    too_long = f"the prompt leaves no room for an answer in {generator.max_model_len} tokens"
    failures = [too_long] * (len(requests) - len(fitting))
    first = fitting[:warmup]
    _generate(generator, first, params)
    served: list[Served] = []
    start = clock()
    try:
        completions = _generate(generator, fitting, params)
    except FloatingPointError as error:
        failures += [str(error)] * len(fitting)
    else:
        for request, completion in zip(fitting, completions, strict=True):
            served.append(Served(len(request.prompt), [moment - start for moment in completion.token_times]))
    return Run(served, failures, clock() - start, len(first))


def figures(run: Run, gpus: int) -> dict[str, Any]:
    """Everything there is to say of a run, as measured: nothing is scaled to another number of GPUs.

    Seconds, and tokens or requests in a second; "per_gpu" is divided by `gpus`. Times to the first token include the
    wait for a place in the batch. Distributions are None where nothing was measured.
    """
    inputs = sum(served.input_tokens for served in run.served)
    outputs = sum(len(served.token_times) for served in run.served)
    several = [served for served in run.served if len(served.token_times) > 1]
    rates = {
        "requests_per_s": len(run.served) / run.seconds,
        "requests_per_min": len(run.served) / run.seconds * 60,
        "output_tokens_per_s": outputs / run.seconds,
        "total_tokens_per_s": (inputs + outputs) / run.seconds,
    }
    return {
        "requests": len(run.served) + len(run.failures),
        "failed": len(run.failures),
        "failures": dict(Counter(run.failures)),
        "warmup_requests": run.warmup_requests,
        "gpus": gpus,
        "seconds": run.seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
        **rates,
        "output_tokens_per_s_per_gpu": rates["output_tokens_per_s"] / gpus,
        "total_tokens_per_s_per_gpu": rates["total_tokens_per_s"] / gpus,
        "first_token_s": distribution([served.token_times[0] for served in run.served]),
        "time_per_token_s": distribution([served.time_per_token for served in several]),
        "token_gap_s": distribution([gap for served in several for gap in served.gaps]),
    }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, interpolated between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def percentile(p: int) -> float:
        place = (len(ordered) - 1) * p / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"mean": sum(ordered) / len(ordered)} | {f"p{p}": percentile(p) for p in PERCENTILES}


def _generate(generator: Generates, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
    """Each request up to its own `max_new_tokens`."""
    if not requests:
        return []
    left = [request.max_new_tokens for request in requests]

    def watch(index: int, token: int) -> bool:
        left[index] -= 1
        return left[index] == 0

    longest = replace(params, max_new_tokens=max(left))
    return generator.generate([request.prompt for request in requests], longest, watch=watch)
