"""The model on several processes of this machine (gloo), against the same model on one."""

import multiprocessing
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import PLAIN_ROPE, V3, Driver, make_batch, make_reference, quantized_copy, random_tokens, save

from moe_int8.models.deepseek.cache import LatentCache
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.generate import Completion, Generator
from moe_int8.models.deepseek.moe import Gate
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.weights import load_model
from moe_int8.parallel import Groups, close_groups, init_groups

TIMEOUT = 60.0  # seconds; nothing here may hang
TOKENS = random_tokens(80)
PROMPTS = [random_tokens(length, seed=length) for length in (3, 70, 12)]
MODEL = V3 | {"num_hidden_layers": 2}
ALL_EXPERTS = MODEL | {  # rounding cannot flip a choice, nor YaRN sharpen the softmax: see tests/models/test_model.py
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "rope_parameters": PLAIN_ROPE,
}


def run_ranks(size: int, work, folder: Path) -> list[Any]:
    """What `work(groups, folder)` returns on each of `size` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = [folder / f"{work.__name__}-{size}-{rank}.pt" for rank in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, work, folder, results[rank])) for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        process.kill()
    exits = [process.exitcode for process in processes]
    assert exits == [0] * size, f"exit codes {exits} (None: still running after {TIMEOUT} s)"
    return [torch.load(result, weights_only=False) for result in results]


def _rank(rank: int, size: int, port: int, work, folder: Path, result: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)  # makes torch's thread pool anew, before the threads of the loader all do so at once
    torch.manual_seed(100 + rank)  # ranks must agree whatever their random state is
    try:
        torch.save(work(init_groups(torch.device("cpu"), timeout_seconds=30), folder), result)
        close_groups()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # now, not when the peers' timeout ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("tensor_parallel")
    save(make_reference(MODEL), base / "fp32")
    save(make_reference(ALL_EXPERTS), base / "all_experts")
    quantized_copy(base / "all_experts", base / "int8", base / "dequantized")
    return base


def fp32_run(groups: Groups, folder: Path) -> tuple[torch.Tensor, list[Completion]]:
    model = load_model(folder / "fp32", groups)
    completions = Generator(model, max_batch=2, max_model_len=128, prefill_chunk=32).generate(
        PROMPTS, SamplingParams(max_new_tokens=6)
    )
    return Driver(model).logits([TOKENS], [range(80)]), completions


@pytest.mark.parametrize("size", [2, 4])
def test_fp32_logits_and_greedy_tokens_do_not_depend_on_the_number_of_ranks(folder, size):
    logits, completions = fp32_run(Groups(), folder)
    for other_logits, other_completions in run_ranks(size, fp32_run, folder):
        torch.testing.assert_close(other_logits, logits, rtol=0, atol=1e-5)
        assert other_completions == completions


def int8_run(groups: Groups, folder: Path) -> torch.Tensor:
    model = load_model(folder / "int8", groups, activation_dtype=torch.float32)
    return Driver(model).logits([TOKENS], [range(80)])


def test_int8_on_two_ranks_stays_within_the_noise_of_its_activations(folder):
    """Ranks round their own slices of the rows that o_proj and down_proj take, so they round differently.

    Each way of rounding is off by at most r * sqrt(12) = 3.1 % from exact activations (derived in
    tests/models/test_model.py); two independent ones differ by sqrt(2) times that, 4.4 %. Margin 2: 9 %.
    """
    one = int8_run(Groups(), folder)
    first, second = run_ranks(2, int8_run, folder)
    assert torch.equal(first, second)  # the ranks themselves agree to the bit
    assert 1e-3 < (first - one).norm() / one.norm() < 0.09


def routing_run(groups: Groups, folder: Path) -> list[torch.Tensor]:
    config = DeepseekConfig.from_dict(V3 | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1})
    gate = Gate(config)
    gate.weight.data.zero_()
    gate.e_score_correction_bias.data.zero_()
    return [gate(torch.randn(4, config.hidden_size))[1] for _ in range(100)]


def test_c22_equal_scores_choose_the_lowest_experts_on_every_rank(folder):
    for ids in run_ranks(2, routing_run, folder):
        assert all(chosen.tolist() == [[0, 1]] * 4 for chosen in ids)


def sampling_run(groups: Groups, folder: Path) -> tuple[list[Completion], list[Completion]]:
    generator = Generator(load_model(folder / "fp32", groups), max_batch=2, max_model_len=128)
    rank = groups.tp.rank
    params = SamplingParams(temperature=1.0, seed=rank, max_new_tokens=16)  # even seeds that differ
    seen = [0] * len(PROMPTS)

    def watch(index: int, token: int) -> bool:
        assert rank == 0, "only the first rank is asked"
        seen[index] += 1
        return seen[index] == 5 + index

    return generator.generate(PROMPTS, params), generator.generate(PROMPTS, params, watch=watch)


def test_c58_ranks_with_different_seeds_generate_the_same_tokens_and_stop_together(folder):
    (whole, stopped), (other_whole, other_stopped) = run_ranks(2, sampling_run, folder)
    assert [len(completion.tokens) for completion in whole] == [16] * 3
    assert other_whole == whole
    assert [(len(completion.tokens), completion.finish_reason) for completion in stopped] == [
        (5, "stop"),
        (6, "stop"),
        (7, "stop"),
    ]
    assert other_stopped == stopped


def moe_run(groups: Groups, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    layer = load_model(folder / "fp32", groups).layers[1].mlp
    x = torch.randn(9, MODEL["hidden_size"], generator=torch.Generator().manual_seed(1))
    return groups.tp.all_reduce(layer(x)), layer.shared_experts(x)


def test_c59_routed_and_shared_experts_are_reduced_together(folder):
    expected, shared = moe_run(Groups(), folder)
    assert shared.norm() > 0.1 * expected.norm()  # it counts
    for output, _ in run_ranks(2, moe_run, folder):
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


def counting_run(groups: Groups, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    calls: list[tuple[str, tuple[int, ...]]] = []
    for name in ("all_reduce", "all_gather"):
        original = getattr(dist, name)

        def counted(*args, _name=name, _original=original, **kwargs):
            calls.append((_name, tuple(args[-1].shape)))
            return _original(*args, **kwargs)

        setattr(dist, name, counted)
    model = load_model(folder / "fp32", groups)
    cache = LatentCache(model.config, 1, torch.float32, torch.device("cpu"))
    hidden, _ = model(torch.tensor([1, 2, 3]), make_batch([[0]], [range(3)]), cache)
    model.logits(hidden[-1:])
    return calls


def test_c59_one_reduction_a_half_layer_and_one_gather_of_logits(folder):
    for calls in run_ranks(2, counting_run, folder):
        assert calls == [("all_reduce", (3, 64))] * (1 + 2 * 2) + [("all_gather", (1, 51))]


def collectives_run(groups: Groups, folder: Path) -> dict[str, Any]:
    group = groups.tp
    mine = torch.tensor([[float(group.rank), 10.0 * group.rank]])
    return {
        "rank": (group.rank, group.size, groups.ep.size, groups.dp.size),
        "reduced": group.all_reduce(mine.clone()).tolist(),
        "gathered": group.all_gather(mine).tolist(),
        "broadcast": group.broadcast(mine.clone() + 1).tolist(),
        "object": group.broadcast_object({"from": group.rank}),
    }


def test_collectives(folder):
    for rank, seen in enumerate(run_ranks(3, collectives_run, folder)):
        assert seen == {
            "rank": (rank, 3, 1, 1),
            "reduced": [[3.0, 30.0]],
            "gathered": [[0.0, 0.0, 1.0, 10.0, 2.0, 20.0]],
            "broadcast": [[1.0, 1.0]],
            "object": {"from": 0},
        }


def broken_run(groups: Groups, folder: Path) -> str:
    model = load_model(folder / "fp32", groups)
    if groups.tp.rank == 1:  # a part that only the second rank holds
        model.layers[0].self_attn.o_proj.weight.data[0, 0] = float("nan")
    try:
        Generator(model, max_batch=1, max_model_len=16).generate([[1, 2]], SamplingParams())
    except FloatingPointError as error:
        return str(error)
    return "no error"


def test_nan_logits_end_every_rank(folder):
    for message in run_ranks(2, broken_run, folder):
        assert "logits are not numbers" in message
