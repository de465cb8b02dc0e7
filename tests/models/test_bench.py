"""What the benchmark counts and by what it divides, with a generator whose time is told by hand."""

from collections.abc import Sequence

import pytest
from tiny import V3, make_reference, random_tokens, save

from moe_int8.models.deepseek.bench import (
    Request,
    Run,
    Served,
    distribution,
    figures,
    measure,
    random_requests,
    read_trace,
)
from moe_int8.models.deepseek.generate import Completion, Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeGenerator:
    """Answers one request after another.

    Args:
        durations: seconds of each request, in the order in which they come; the tokens come evenly.
        ends: after so many tokens the model ends request i of a call itself; without it none does.
    """

    max_model_len = 64

    def __init__(self, clock: Clock, durations: Sequence[float], ends: dict[int, int] | None = None) -> None:
        self.clock = clock
        self.durations = list(durations)
        self.ends = ends or {}
        self.calls: list[int] = []

    def generate(self, prompts, params, *, watch=None):
        self.calls.append(len(prompts))
        completions = []
        for index in range(len(prompts)):
            duration, start = self.durations.pop(0), self.clock.now
            tokens: list[int] = []
            reason = "length"
            while reason == "length" and len(tokens) < params.max_new_tokens:
                tokens.append(7)
                if len(tokens) == self.ends.get(index) or watch(index, 7):
                    reason = "stop"
            count = len(tokens)
            completions.append(Completion(tokens, reason, [start + duration * (i + 1) / count for i in range(count)]))
            self.clock.now += duration
        return completions


def run_fake(requests, durations, warmup=0, **fake):
    clock = Clock()
    generator = FakeGenerator(clock, durations, **fake)
    return generator, measure(generator, requests, SamplingParams(), warmup=warmup, clock=clock)


def test_c71_tokens_are_those_generated_not_text_tokenized_again():
    _, run = run_fake([Request([1, 2, 3], 100)], [1.0], ends={0: 7})  # the same id seven times, one word as text
    assert figures(run, gpus=1)["output_tokens"] == 7
    assert figures(run, gpus=1)["input_tokens"] == 3


def test_c72_time_per_token_is_divided_by_the_real_length():
    """128 were asked for, ten came: the first after 0.1 s, the last at 1.0 s."""
    _, run = run_fake([Request([1], 128)], [1.0], ends={0: 10})
    found = figures(run, gpus=1)
    assert found["first_token_s"]["p50"] == pytest.approx(0.1)
    assert found["time_per_token_s"]["p50"] == pytest.approx(0.1)  # and not 0.9 / 127 = 0.0071
    assert found["token_gap_s"]["p99"] == pytest.approx(0.1)
    assert found["output_tokens_per_s"] == pytest.approx(10.0)


def test_c73_the_warm_up_is_counted_apart():
    """One request of 30 s that compiles, then four of 1 s with ten tokens each."""
    requests = [Request([1], 10)] * 4
    generator, run = run_fake(requests, [30.0, 1.0, 1.0, 1.0, 1.0], warmup=1)
    found = figures(run, gpus=1)
    assert generator.calls == [1, 4]
    assert found["output_tokens_per_s"] == pytest.approx(10.0)  # and not 50 / 34 = 1.47
    assert found["requests_per_s"] == pytest.approx(1.0)
    assert found["requests_per_min"] == pytest.approx(60.0)
    assert found["warmup_requests"] == 1
    assert run_fake(requests[:2], [1.0] * 4, warmup=3)[1].warmup_requests == 2  # there are no more
    assert found["requests"] == 4
    assert found["first_token_s"]["p50"] == pytest.approx(1.6)  # 0.1, 1.1, 2.1, 3.1 s: without the 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save(make_reference(V3 | {"num_hidden_layers": 2}), tmp_path_factory.mktemp("model")))


def test_c74_tokens_after_the_end_of_a_sequence_do_not_count(model):
    """A real batch of two, up to ten tokens each, of which one ends after three."""
    generator = Generator(model, max_batch=2, max_model_len=64)
    requests = [Request(random_tokens(5), 10), Request(random_tokens(6, seed=1), 10)]
    stopping, other = generator.generate([request.prompt for request in requests], SamplingParams(max_new_tokens=10))
    end = stopping.tokens[2]
    assert end not in stopping.tokens[:2] + other.tokens
    for ignore_eos, tokens in ((False, 3 + 10), (True, 10 + 10)):
        params = SamplingParams(eos_token_ids=(end,), ignore_eos=ignore_eos)
        found = figures(measure(generator, requests, params, warmup=0), gpus=1)
        assert found["output_tokens"] == tokens
        assert found["input_tokens"] == 5 + 6


def test_c74_each_request_has_its_own_length(model):
    generator = Generator(model, max_batch=2, max_model_len=64)
    requests = [Request(random_tokens(5), length) for length in (1, 7, 3)]
    run = measure(generator, requests, SamplingParams(max_new_tokens=2), warmup=1)
    assert [len(served.token_times) for served in run.served] == [1, 7, 3]
    moments = [moment for served in run.served for moment in served.token_times]
    assert min(moments) > 0
    assert max(moments) <= run.seconds
    assert all(gap > 0 for served in run.served for gap in served.gaps)
    assert run.served[2].token_times[0] > run.served[0].token_times[0]  # it waited for the first one's place


def test_c74_tokens_count_once_and_not_once_per_rank():
    run = Run([Served(6, [0.5, 1.0])], [], seconds=1.0, warmup_requests=0)
    for gpus in (1, 2, 16):
        found = figures(run, gpus)
        assert (found["output_tokens"], found["output_tokens_per_s"]) == (2, 2.0)
        assert (found["input_tokens"], found["total_tokens_per_s"]) == (6, 8.0)


def test_c75_raw_and_per_gpu_with_the_number_of_gpus():
    run = Run([Served(100, [1.0] * 222501)], [], seconds=100.0, warmup_requests=0)
    found = figures(run, gpus=16)
    assert found["output_tokens_per_s"] == pytest.approx(2225.01)
    assert found["gpus"] == 16
    assert found["output_tokens_per_s_per_gpu"] == pytest.approx(139.06, abs=0.005)
    assert found["total_tokens_per_s_per_gpu"] == pytest.approx((222501 + 100) / 100 / 16)


def test_a_prompt_that_does_not_fit_fails_alone():
    requests = [Request([1] * length, 5) for length in (63, 64, 3)]
    _, run = run_fake(requests, [1.0, 1.0])
    found = figures(run, gpus=1)
    assert (found["requests"], found["failed"], found["output_tokens"]) == (3, 1, 10)
    assert found["failures"] == {"the prompt leaves no room for an answer in 64 tokens": 1}
    assert found["requests_per_s"] == pytest.approx(1.0)  # two in two seconds: what failed is not served
    assert found["input_tokens"] == 66


def test_broken_logits_fail_all_requests_and_nothing_is_divided_by_zero():
    clock = Clock()

    class Broken(FakeGenerator):
        def generate(self, prompts, params, *, watch=None):
            self.clock.now += 2.0
            raise FloatingPointError("the model's logits are not numbers")

    run = measure(Broken(clock, []), [Request([1], 5)] * 3, SamplingParams(), warmup=0, clock=clock)
    found = figures(run, gpus=2)
    assert found["failures"] == {"the model's logits are not numbers": 3}
    assert found["output_tokens_per_s"] == 0
    assert found["first_token_s"] is found["time_per_token_s"] is found["token_gap_s"] is None


def test_a_single_token_has_no_time_per_token():
    _, run = run_fake([Request([1], 1), Request([1], 3)], [1.0, 3.0])
    assert figures(run, gpus=1)["time_per_token_s"] == pytest.approx(
        dict.fromkeys(("mean", "p50", "p75", "p95", "p99"), 1)
    )


def test_percentiles_lie_between_neighbours():
    found = distribution([float(value) for value in range(100, -1, -1)])
    assert found == {"mean": 50, "p50": 50, "p75": 75, "p95": 95, "p99": 99}
    assert distribution([1.0, 2.0])["p75"] == 1.75
    assert distribution([3.0])["p99"] == 3.0


def test_random_requests_have_the_lengths_and_come_from_the_seed():
    lengths = [(3, 5), (70, 1)]
    requests = random_requests(lengths, vocab_size=11, seed=1)
    assert [(len(request.prompt), request.max_new_tokens) for request in requests] == lengths
    assert set(requests[1].prompt) == set(range(11))  # 70 of 11 ids: that one is missing has a chance of 1 in 70
    assert random_requests(lengths, vocab_size=11, seed=1) == requests
    assert random_requests(lengths, vocab_size=11, seed=2) != requests


def test_a_trace_gives_the_first_lengths(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44\n2023-11-16,396,109\n2023-11-16,8,9\n")
    assert read_trace(trace, 2) == [(374, 44), (396, 109)]
    assert read_trace(trace, 10) == [(374, 44), (396, 109), (8, 9)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens"),
        ("", "no column ContextTokens"),
        ("ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("ContextTokens,GeneratedTokens\n5,5\n5,0\n", "line 3: expected two lengths"),
        ("ContextTokens,GeneratedTokens\n5,-1\n", "line 2: expected two lengths"),
        ("ContextTokens,GeneratedTokens\n5\n", "line 2: expected two lengths"),
        ("ContextTokens,GeneratedTokens\n5,1e3\n", "line 2: expected two lengths"),
        (f"ContextTokens,GeneratedTokens\n5,{2**20 + 1}\n", "line 2: expected two lengths"),
        (f"ContextTokens,GeneratedTokens\n5,{'9' * 10000}\n", "line 2: expected two lengths"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path, text, message):
    trace = tmp_path / "t.csv"
    trace.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(trace, 10)


def test_what_is_no_csv_is_refused(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.csv is no UTF-8 text"):
        read_trace(trace, 10)
    trace.write_text(f"ContextTokens,GeneratedTokens\n{'5' * 200_000},1\n")  # longer than csv's largest field
    with pytest.raises(ValueError, match=r"t\.csv is no CSV: field larger"):
        read_trace(trace, 10)
