"""fused_moe: equal bits on every path, batch invariance, and the cases C01 to C04, C06 to C08 and C13."""

import math
from typing import NamedTuple

import pytest
import torch

from moe_int8 import moe
from moe_int8.activation import swiglu
from moe_int8.dense import int8_scaled_mm_ref, w8a8_linear
from moe_int8.dispatch import INTERPRETED
from moe_int8.moe import fused_moe, fused_moe_ref
from moe_int8.numerics import ACCUMULATORS
from moe_int8.quantize import quantize_per_token_ref
from moe_int8.tuning import CONFIG_DIR_VARIABLE, LaunchConfig, config_file_name, moe_plan, save_configs

SILU_1 = 0.7310585786300049


class Experts(NamedTuple):
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def random_experts(E: int, H: int, I: int, device: str) -> Experts:  # noqa: E741
    """Random codes; scales such that gate, up and the result are of the size of x."""
    w13 = torch.randint(-127, 128, (E, 2 * I, H), dtype=torch.int8, device=device)
    w2 = torch.randint(-127, 128, (E, H, I), dtype=torch.int8, device=device)
    w13_scale = (torch.rand(E, 2 * I, 1, device=device) + 0.5) / (73 * math.sqrt(H))
    w2_scale = (torch.rand(E, H, 1, device=device) + 0.5) / (73 * math.sqrt(I))
    return Experts(w13, w13_scale, w2, w2_scale)


def random_routing(M: int, E: int, topk: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    topk_ids = torch.rand(M, E, device=device).topk(topk).indices.to(torch.int32)
    return torch.rand(M, topk, device=device) + 0.1, topk_ids


def scalar_experts(gate: list, up: list, down: list, device: str) -> Experts:
    """Experts with hidden = inter = 1 that stand for these numbers."""
    w13 = torch.tensor([gate, up], device=device).T.unsqueeze(-1)  # [E, 2, 1]
    w2 = torch.tensor([down], device=device).T.unsqueeze(-1)  # [E, 1, 1]
    return Experts(*quantize_per_token_ref(w13), *quantize_per_token_ref(w2))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("M, H, I, E, topk", [(1, 64, 64, 16, 4), (3, 5, 3, 3, 2), (20, 200, 130, 4, 3)])
def test_equals_definition_bit_for_bit_where_exp_is_exact(M, H, I, E, topk, dtype, accumulator, device):  # noqa: E741
    """Gates above 18 make 1 + exp(-gate) round to exactly 1, so the devices' different exp cannot show."""
    experts = random_experts(E, H, I, device)
    experts.w13[:, :I] = experts.w13[:, :I].abs().clamp_min(64)
    experts.w13_scale[:, :I] = 0.5 / H
    topk_weights, topk_ids = random_routing(M, E, topk, device)
    topk_ids[M // 2, 0] = -1
    x = (torch.rand(M, H, device=device) + 1).to(dtype)  # gate >= 64 * 0.5 = 32
    options = {"routed_scaling_factor": 2.5, "accumulator": accumulator}
    y = fused_moe(x, *experts, topk_weights, topk_ids, **options)
    assert y.dtype == dtype
    assert torch.equal(y, fused_moe_ref(x, *experts, topk_weights, topk_ids, **options))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_differs_from_the_cpu_by_exp_alone(dtype, accumulator, device):
    """On a CPU: not at all. Elsewhere exp is a few ulp off, which moves h by at most one ulp of its dtype.

    That is at most one step of its quantizer (in bf16; far less in fp32). Each quantized row is within half a step of
    its h, so two of them are within two steps of each other, and the outputs within two steps of every |w2|, plus the
    rounding of z and y.
    """
    M, H, I, E, topk = 20, 200, 130, 4, 3  # noqa: E741
    experts = random_experts(E, H, I, "cpu")
    topk_weights, topk_ids = random_routing(M, E, topk, "cpu")
    x = torch.randn(M, H).to(dtype)
    expected = fused_moe_ref(x, *experts, topk_weights, topk_ids, accumulator=accumulator)
    arguments = (t.to(device) for t in (x, *experts, topk_weights, topk_ids))
    y = fused_moe(*arguments, accumulator=accumulator).cpu()
    if device == "cpu" and not INTERPRETED:
        assert torch.equal(y, expected)
        return
    q, scale = quantize_per_token_ref(x)
    bound = 4 * torch.finfo(dtype).eps * (1 + expected.float().abs())
    for m in range(M):
        for weight, e in zip(topk_weights[m].tolist(), topk_ids[m].tolist(), strict=True):
            w13, w13_scale, w2, w2_scale = (t[e] for t in experts)
            gate_up = int8_scaled_mm_ref(q[m : m + 1], w13, scale[m : m + 1], w13_scale, out_dtype=torch.float32)
            step = swiglu(*gate_up.chunk(2, dim=-1)).abs().max() / 127
            bound[m] += weight * 2 * step * (w2.float().abs().sum(-1) * w2_scale[:, 0])
    assert ((y - expected).float().abs() <= bound).all()
    # A code moves only where it stood within a few 2^-22 of an edge, so most tokens have none that did.
    ulp = torch.finfo(dtype).eps
    untouched = torch.isclose(y.float(), expected.float(), rtol=4 * ulp, atol=4 * ulp).all(dim=-1)
    assert untouched.float().mean() >= 0.75


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("I", [48, 300])  # rows of h held at once, or not
def test_a_token_has_the_same_bits_alone_in_any_batch_and_tile(I, accumulator, device, tmp_path, monkeypatch):  # noqa: E741
    small = INTERPRETED and device == "cpu"  # the interpreter is slow
    M, H, E, topk = (70, 160, 4, 2) if small else (300, 448, 16, 4)  # single tokens take kernels of their own
    experts = random_experts(E, H, I, device)
    topk_weights, topk_ids = random_routing(M, E, topk, device)
    x = torch.randn(M, H, dtype=torch.bfloat16, device=device)

    def run(tokens: slice) -> torch.Tensor:
        return fused_moe(x[tokens], *experts, topk_weights[tokens], topk_ids[tokens], accumulator=accumulator)

    whole = run(slice(None))
    assert whole.float().std() > 0.1
    for tokens in (slice(0, 1), slice(M - 1, M), slice(11, 18)):
        assert torch.equal(run(tokens), whole[tokens])
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    for number, config in enumerate([LaunchConfig(16, 32, 256, 2, 2, 2), LaunchConfig(64, 64, 64, 3, 4, 3)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_configs(folder / config_file_name(name, E=E, N=I), {1: config})
        monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(folder))
        assert moe_plan(M, topk, E, I, x.device, "int32").gate_up == config
        assert torch.equal(run(slice(None)), whole)


def test_int8_x_with_scales_equals_x_quantized_inside(device):
    experts = random_experts(3, 40, 24, device)
    topk_weights, topk_ids = random_routing(5, 3, 2, device)
    x = torch.randn(5, 40, dtype=torch.bfloat16, device=device)
    q, scale = quantize_per_token_ref(x)
    y = fused_moe(x, *experts, topk_weights, topk_ids)
    assert torch.equal(fused_moe(q, *experts, topk_weights, topk_ids, x_scale=scale), y)
    assert torch.equal(fused_moe(q, *experts, topk_weights, topk_ids, x_scale=scale[:, 0]), y)
    # With int8 x the dtype of the result is also that of the values in between.
    wide = fused_moe(q, *experts, topk_weights, topk_ids, x_scale=scale, out_dtype=torch.float32)
    assert torch.equal(wide, fused_moe(q.float() * 0 + x.float(), *experts, topk_weights, topk_ids))
    # With bf16 x only the last cast differs.
    last = fused_moe(x, *experts, topk_weights, topk_ids, out_dtype=torch.float32)
    assert torch.equal(last.bfloat16(), y)
    assert not torch.equal(last, y.float())


def test_layouts_of_the_arguments_do_not_matter(device):
    E, H, I, M, topk = 3, 40, 24, 6, 2  # noqa: E741
    experts = random_experts(E, H, I, device)
    topk_weights, topk_ids = random_routing(M, E, topk, device)
    x = torch.randn(M, H, dtype=torch.bfloat16, device=device)
    y = fused_moe(x, *experts, topk_weights, topk_ids)

    apart = torch.zeros(M, H + 8, dtype=torch.bfloat16, device=device)
    apart[:, :H] = x
    assert torch.equal(fused_moe(apart[:, :H], *experts, topk_weights, topk_ids.long()), y)
    three = (x.view(2, 3, H), *experts, topk_weights.view(2, 3, topk), topk_ids.view(2, 3, topk))
    assert torch.equal(fused_moe(*three), y.view(2, 3, H))
    columns = (topk_weights.T.contiguous().T, topk_ids.T.contiguous().T)
    flat = Experts(experts.w13, experts.w13_scale[..., 0], experts.w2, experts.w2_scale[..., 0])
    assert torch.equal(fused_moe(x, *flat, *columns), y)
    wide_rows = Experts(
        torch.cat([experts.w13, experts.w13], dim=2)[..., :H],
        experts.w13_scale,
        torch.cat([experts.w2, experts.w2], dim=2)[..., :I],
        experts.w2_scale,
    )
    assert torch.equal(fused_moe(x, *wide_rows, topk_weights, topk_ids), y)


def test_an_expert_taken_twice_counts_twice(device):
    experts = scalar_experts([1.0], [1.0], [1.0], device)
    ids = torch.zeros(1, 2, dtype=torch.int32, device=device)
    y = fused_moe(torch.ones(1, 1, device=device), *experts, torch.ones(1, 2, device=device), ids)
    assert y.item() == pytest.approx(2 * SILU_1, rel=1e-6)


def test_nan_token_touches_no_other(device):
    experts = random_experts(2, 40, 24, device)
    topk_weights, topk_ids = random_routing(3, 2, 2, device)
    x = torch.randn(3, 40, device=device)
    clean = fused_moe(x, *experts, topk_weights, topk_ids)
    x[1, 5] = float("inf")
    y = fused_moe(x, *experts, topk_weights, topk_ids)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert not y[1].isfinite().any()


def test_c01_scratch_is_bounded_at_long_prefills():
    tokens, topk, H = 56_000, 8, 7168
    assert tokens * topk * H - 1 == 3_211_263_999 > 2**31 - 1  # the last offset, were all tokens held at once
    for I in (64, 128, 2048):  # noqa: E741
        w2 = torch.empty(256, H, I, dtype=torch.int8, device="meta")
        chunk = moe.SCRATCH_BYTES // moe._scratch_bytes_per_token(topk, w2, torch.bfloat16)
        assert chunk >= 1024  # long enough that reading the weights again for each chunk does not count
        assert chunk * topk * (2 * H + 3 * I + 4) <= 512 * 2**20


@pytest.mark.gpu
def test_c01_offsets_beyond_32_bits(monkeypatch):
    M, H, I, E, topk = 37_500, 7168, 64, 8, 8  # noqa: E741
    monkeypatch.setattr(moe, "SCRATCH_BYTES", 2**36)  # one chunk, whose expert outputs have 2,150,400,000 elements
    experts = random_experts(E, H, I, "cuda")
    topk_weights, topk_ids = random_routing(M, E, topk, "cuda")
    x = torch.randn(M, H, dtype=torch.bfloat16, device="cuda")
    y = fused_moe(x, *experts, topk_weights, topk_ids)
    last = slice(M - 1, M)
    assert torch.equal(y[last], fused_moe(x[last], *experts, topk_weights[last], topk_ids[last]))
    monkeypatch.undo()
    assert torch.equal(fused_moe(x, *experts, topk_weights, topk_ids), y)


@pytest.mark.parametrize("M", [4, 5, 6, 8])
def test_c02_chunks_do_not_show(M, device, monkeypatch):
    H, I, E, topk = 40, 24, 3, 2  # noqa: E741
    experts = random_experts(E, H, I, device)
    topk_weights, topk_ids = random_routing(M, E, topk, device)
    x = torch.randn(M, H, device=device)
    x[4:] *= 100  # a scale left over from the chunk before would show
    whole = fused_moe(x, *experts, topk_weights, topk_ids)
    q, scale = quantize_per_token_ref(x)
    whole_int8 = fused_moe(q, *experts, topk_weights, topk_ids, x_scale=scale)

    sizes = []

    def recording(chunk: torch.Tensor, *rest: object) -> None:
        sizes.append(chunk.shape[0])
        run(chunk, *rest)

    name = "_run_cpu" if device == "cpu" and not INTERPRETED else "_run_triton"
    run = getattr(moe, name)
    monkeypatch.setattr(moe, name, recording)
    monkeypatch.setattr(moe, "SCRATCH_BYTES", 4 * moe._scratch_bytes_per_token(topk, experts.w2, x.dtype))
    assert torch.equal(fused_moe(x, *experts, topk_weights, topk_ids), whole)
    assert sizes == ([4, M - 4] if M > 4 else [4])
    assert torch.equal(fused_moe(q, *experts, topk_weights, topk_ids, x_scale=scale), whole_int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_c03_no_tokens(dtype, device):
    experts = random_experts(16, 64, 32, device)
    x = torch.empty(0, 64, dtype=dtype, device=device)
    ids = torch.empty(0, 8, dtype=torch.int32, device=device)
    y = fused_moe(x, *experts, ids.float(), ids)
    assert y.shape == (0, 64)
    assert y.dtype == dtype
    assert fused_moe(x, *experts, ids.float(), ids, out=x) is x


def test_c03_one_token_and_255_idle_experts(device):
    experts = scalar_experts([1.0] * 256, [1.0] * 256, [float(e + 1) for e in range(256)], device)
    ids = torch.full((1, 1), 200, dtype=torch.int32, device=device)
    y = fused_moe(torch.ones(1, 1, device=device), *experts, torch.ones(1, 1, device=device), ids)
    assert y.item() == pytest.approx(201 * SILU_1, rel=1e-6)


def test_c04_second_gemm_scales_by_slot(device):
    experts = scalar_experts([1.0, 1.0], [1.0, 100.0], [1.0, 1.0], device)
    half, ids = torch.full((1, 2), 0.5, device=device), torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    y = fused_moe(torch.ones(1, 1, device=device), *experts, half, ids)
    assert y.item() == pytest.approx(36.9185, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_c06_experts_of_other_ranks_contribute_zero(dtype, device):
    experts = scalar_experts([1.0] * 4, [1.0] * 4, [1.0, 2.0, 3.0, 4.0], device)
    x, half = torch.ones(2, 1, device=device), torch.full((2, 2), 0.5, device=device)
    ids = torch.tensor([[0, 2], [3, 2]], dtype=dtype, device=device)
    rank_a, rank_b = (
        fused_moe(x, *(t[local] for t in experts), half, ids, expert_map=torch.tensor(expert_map, device=device).int())
        for local, expert_map in ((slice(0, 2), [0, 1, -1, -1]), (slice(2, 4), [-1, -1, 0, 1]))
    )
    assert rank_a[0].item() == pytest.approx(0.365529, abs=1e-6)
    assert rank_a[1].item() == 0.0
    assert rank_b.flatten().tolist() == pytest.approx([1.096588, 2.558705], abs=1e-6)
    assert torch.equal(rank_a + rank_b, fused_moe(x, *experts, half, ids))


def test_c06_ids_that_name_no_expert_contribute_zero(device):
    experts = scalar_experts([1.0, 1.0], [1.0, 1.0], [1.0, float("inf")], device)  # the last one must not be read
    ids = torch.tensor([[0, -1], [2, 0], [-7, 2**31 - 1]], dtype=torch.int32, device=device)
    x, ones = torch.ones(3, 1, device=device), torch.ones(3, 2, device=device)
    assert fused_moe(x, *experts, ones, ids).flatten().tolist() == pytest.approx([SILU_1, SILU_1, 0.0], rel=1e-6)
    huge = ids.long() * 2**32
    assert fused_moe(x, *experts, ones, huge).flatten().tolist() == pytest.approx([SILU_1, SILU_1, 0.0], rel=1e-6)


def test_c06_map_entry_beyond_the_local_experts_contributes_zero(device):
    experts = scalar_experts([1.0], [1.0], [1.0], device)
    expert_map = torch.tensor([0, 1], dtype=torch.int32, device=device)  # this rank holds one expert only
    ids = torch.tensor([[1, 0], [1, 1]], dtype=torch.int32, device=device)
    x, ones = torch.ones(2, 1, device=device), torch.ones(2, 2, device=device)
    y = fused_moe(x, *experts, ones, ids, expert_map=expert_map)
    assert y.flatten().tolist() == pytest.approx([SILU_1, 0.0], rel=1e-6)


def by_hand(x: list, w13: list, w13_scale: list, w2: list, w2_scale: list, weights: list, ids: list) -> list:
    """The layer for fp32 in Python's floats, one token at a time."""

    def quantize(row: list) -> tuple[list, float]:
        amax = max(map(abs, row))
        return [round(v * (127 / amax)) for v in row], amax / 127

    def linear(row: list, weight: list, weight_scale: list) -> list:
        q, scale = quantize(row)
        sums = [sum(a * b for a, b in zip(q, w, strict=True)) for w in weight]
        return [total * scale * s for total, s in zip(sums, weight_scale, strict=True)]

    result = []
    for row, row_weights, row_ids in zip(x, weights, ids, strict=True):
        total = [0.0] * len(row)
        for weight, e in zip(row_weights, row_ids, strict=True):
            gate_up = linear(row, w13[e], w13_scale[e])
            half = len(gate_up) // 2
            h = [g / (1 + math.exp(-g)) * u for g, u in zip(gate_up[:half], gate_up[half:], strict=True)]
            y = linear(h, w2[e], w2_scale[e])
            total = [a + weight * b for a, b in zip(total, y, strict=True)]
        result.append(total)
    return result


def test_c07_ragged_sizes(device):
    H, I, E, M = 5, 3, 3, 3  # noqa: E741
    w13 = (torch.arange(E * 2 * I * H) * 37 % 255 - 127).view(E, 2 * I, H)
    w2 = (torch.arange(E * H * I) * 53 % 255 - 127).view(E, H, I)
    w13_scale, w2_scale = (torch.arange(n).view(E, -1) % 4 * 0.001 + 0.002 for n in (E * 2 * I, E * H))
    x = (torch.arange(M * H) * 7 % 11 - 5).view(M, H) * 0.25
    weights, ids = torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.75, 2.0]]), torch.tensor([[0, 2], [1, 0], [2, 1]])
    numbers = (x, w13, w13_scale, w2, w2_scale, weights, ids)
    expected = torch.tensor(by_hand(*(t.tolist() for t in numbers)))
    y = fused_moe(*(t.to(device) for t in (x, w13.to(torch.int8), w13_scale, w2.to(torch.int8), *numbers[4:])))
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("M", [1, 16, 300])
def test_c07_tp32_shard_equals_definition(M, accumulator):
    E, H, I, topk = 32, 7168, 64, 8  # noqa: E741
    experts = random_experts(E, H, I, "cuda")
    topk_weights, topk_ids = random_routing(M, E, topk, "cuda")
    x = torch.randn(M, H, dtype=torch.bfloat16, device="cuda")
    y = fused_moe(x, *experts, topk_weights, topk_ids, accumulator=accumulator)
    expected = fused_moe_ref(x, *experts, topk_weights, topk_ids, accumulator=accumulator)
    # Triton's exp against torch's: a code of h at an edge moves by one, in few rows.
    assert torch.isclose(y, expected, rtol=2**-7, atol=2**-7).float().mean() > 0.95
    torch.testing.assert_close(y, expected, rtol=0, atol=0.15)


def test_c08_input_is_left_alone_unless_it_is_out(device):
    experts = random_experts(3, 40, 24, device)
    topk_weights, topk_ids = random_routing(5, 3, 2, device)
    x = torch.randn(5, 40, dtype=torch.bfloat16, device=device)
    before = x.clone()
    y = fused_moe(x, *experts, topk_weights, topk_ids)
    assert torch.equal(x, before)

    out = torch.empty(5, 48, dtype=torch.bfloat16, device=device)[:, :40]
    assert fused_moe(x, *experts, topk_weights, topk_ids, out=out) is out
    assert torch.equal(out, y)
    assert torch.equal(x, before)
    wide = torch.empty(5, 40, device=device)
    fused_moe(x, *experts, topk_weights, topk_ids, out=wide)
    assert torch.equal(wide.bfloat16(), y)

    assert fused_moe(x, *experts, topk_weights, topk_ids, out=x) is x
    assert torch.equal(x, y)


def test_c08_in_place_over_several_chunks(device, monkeypatch):
    experts = random_experts(3, 40, 24, device)
    topk_weights, topk_ids = random_routing(5, 3, 2, device)
    x = torch.randn(5, 40, device=device)
    y = fused_moe(x, *experts, topk_weights, topk_ids)
    monkeypatch.setattr(moe, "SCRATCH_BYTES", 1)  # a token at a time
    assert torch.equal(fused_moe(x, *experts, topk_weights, topk_ids, out=x), y)


@pytest.mark.gpu
def test_c13_cuda_graph_follows_the_routing():
    M, E, H, topk = 4, 16, 256, 4
    experts = random_experts(E, H, 64, "cuda")
    x = torch.randn(M, H, dtype=torch.bfloat16, device="cuda")
    topk_weights, topk_ids = random_routing(M, E, topk, "cuda")
    topk_ids.copy_(torch.arange(topk).expand(M, topk))  # all tokens on the first experts
    fused_moe(x, *experts, topk_weights, topk_ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused_moe(x, *experts, topk_weights, topk_ids)
    for ids in (torch.arange(E - topk, E).expand(M, topk), torch.arange(M * topk).view(M, topk)):
        topk_ids.copy_(ids)
        x.normal_()
        graph.replay()
        assert torch.equal(y, fused_moe(x, *experts, topk_weights, topk_ids))


def layer(x: torch.Tensor, experts: Experts, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
    """Routed plus shared expert, as a model has it."""
    shared = w8a8_linear(x, experts.w2[0, :, : x.shape[1]], experts.w2_scale[0])
    return fused_moe(x, *experts, topk_weights, topk_ids, routed_scaling_factor=2.5) + shared


def test_c13_compiles_without_a_graph_break(device):
    experts = random_experts(3, 40, 40, device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    for M in (4, 1):
        arguments = (torch.randn(M, 40, device=device), experts, *random_routing(M, 3, 2, device))
        assert torch.equal(compiled(*arguments), layer(*arguments))


@pytest.mark.gpu
def test_c13_compile_and_cuda_graphs_together():
    experts = random_experts(8, 256, 256, "cuda")
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):  # warm-up, capture, replays with other tokens and experts
        x = torch.randn(4, 256, device="cuda")
        routing = random_routing(4, 8, 2, "cuda")
        assert torch.equal(compiled(x, experts, *routing), layer(x, experts, *routing))


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_custom_ops_keep_their_promises(accumulator, device):
    E, H, M = 3, 20, 4
    experts = random_experts(E, H, 12, device)
    topk_weights, topk_ids = random_routing(M, E, 2, device)
    x = torch.randn(M, H, device=device)
    w13, w13_scale, w2, w2_scale = experts
    expert_map = torch.arange(E, dtype=torch.int32, device=device)
    arguments = (x, None, w13, w13_scale[..., 0], w2, w2_scale[..., 0], expert_map, topk_weights, topk_ids, 2.5)
    arguments += (accumulator,)
    torch.library.opcheck(torch.ops.moe_int8.fused_moe.default, (*arguments, torch.float32))
    out = torch.zeros(M, H, device=device)
    torch.library.opcheck(torch.ops.moe_int8.fused_moe_out.default, (*arguments, out))


def test_errors_name_the_argument(device):
    experts = random_experts(3, 40, 24, device)
    topk_weights, topk_ids = random_routing(5, 3, 2, device)
    x = torch.randn(5, 40, device=device)

    def refuses(message: str, **changes: object) -> None:
        arguments = {"x": x, **experts._asdict(), "topk_weights": topk_weights, "topk_ids": topk_ids, **changes}
        with pytest.raises(ValueError, match=message):
            fused_moe(**arguments)

    refuses(r"x must be .*got float64 \[5, 40\]", x=x.double())
    refuses(r"x \(with x_scale\) must be int8 .*got float32", x_scale=x[:, :1])
    refuses(r"x_scale must be float32 \[5, 1\].*got float32 \[4, 1\]", x=x.to(torch.int8), x_scale=x[:4, :1])
    refuses(r"w13 must be int8 \[E, 2I, 40\].*got int8 \[3, 40, 48\]", w13=experts.w13.transpose(1, 2))
    refuses(r"w13 must hold as many gate as up rows, got 47", w13=experts.w13[:, :47])
    refuses(r"w13_scale must be float32 \[3, 48, 1\].*got float32 \[3, 47, 1\]", w13_scale=experts.w13_scale[:, :47])
    refuses(r"w2 must be int8 \[3, 40, 24\].*got int8 \[3, 40, 23\]", w2=experts.w2[..., :23])
    refuses(r"w2_scale must be float32 \[3, 40\].*got bfloat16", w2_scale=experts.w2_scale[..., 0].bfloat16())
    refuses(r"topk_weights must be float32 \[5, topk\].*got float32 \[4, 2\]", topk_weights=topk_weights[:4])
    refuses(r"topk_ids must be int32 or int64 \[5, 2\].*got int32 \[5, 1\]", topk_ids=topk_ids[:, :1])
    refuses(r"topk_ids must be int32 or int64.*got int16", topk_ids=topk_ids.short())
    refuses(
        r"topk_ids must name at least one expert.*\[5, 0\]", topk_weights=topk_weights[:, :0], topk_ids=topk_ids[:, :0]
    )
    refuses(r"expert_map must have an entry", expert_map=torch.empty(0, dtype=torch.int32, device=device))
    refuses(r"expert_map must be int32 \[E_global\].*got int64", expert_map=torch.arange(3, device=device))
    refuses(r"accumulator must be one of int32, fp32, got 'bf16'", accumulator="bf16")
    refuses(r"out must be bfloat16 \[5, 40\].*got float32 \[5, 40\]", out=x.clone(), out_dtype=torch.bfloat16)
    refuses(r"out must be float32 \[5, 40\].*got float32 \[5, 39\]", out=x[:, :39])
