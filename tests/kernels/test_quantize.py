import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_int8 import quantize
from moe_int8.quantize import dequantize, quantize_per_channel, quantize_per_token, quantize_per_token_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M, K", [(1, 1), (3, 100), (2, 7168), (2, 18432)])  # 18432: a row of several blocks
def test_matches_reference_bit_for_bit(M, K, dtype, device):
    x = torch.randn(M, K, dtype=dtype, device=device) * torch.tensor([[3.0], [1e-3], [7e3]], device=device)[:M].to(
        dtype
    )
    q, scale = quantize_per_token(x)
    q_ref, scale_ref = quantize_per_token_ref(x)
    assert torch.equal(q, q_ref)
    assert torch.equal(scale, scale_ref)


def test_c25_zero_row_gives_zero_codes_and_a_finite_scale(device):
    x = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, -2.5, 3.0, 4.0]], device=device)
    q, scale = quantize_per_token(x)
    assert q.tolist() == [[0, 0, 0, 0], [32, -79, 95, 127]]
    assert scale[0].isfinite()
    assert dequantize(q, scale)[0].tolist() == [0, 0, 0, 0]
    assert scale[1].item() == pytest.approx(4 / 127, rel=1e-6)


def test_c26_ties_round_to_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], device=device)  # scale is exactly 1
    assert quantize_per_token(x)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_c27_row_strided_slice(device):
    base = torch.tensor([[1, 2.5, 3, 4, 100, 100], [5, 6, 7, 8, 100, 100]], device=device)
    q, scale = quantize_per_token(base[:, :4])
    assert q.tolist() == [[32, 79, 95, 127], [79, 95, 111, 127]]
    assert scale.flatten().tolist() == pytest.approx([4 / 127, 8 / 127], rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_c28_non_finite_row_shows_and_touches_no_other(bad, device):
    x = torch.tensor([[bad, 1, 2, 3], [1, 2.5, 3, 4]], device=device)
    q, scale = quantize_per_token(x)
    assert q.tolist() == [[0, 0, 0, 0], [32, 79, 95, 127]]
    assert not scale[0].isfinite()
    assert not dequantize(q, scale)[0].isfinite().any()
    assert torch.equal(scale[1:], quantize_per_token(x[1:])[1])


@pytest.mark.parametrize("M", [1, 3, 4, 10])  # three rows are worked on at a time
def test_a_large_input_has_the_same_bits_as_a_small_one(M, monkeypatch):
    monkeypatch.setattr(quantize, "CPU_CHUNK", 3 * 100)
    x = torch.randn(M, 100)
    x[-1, 2] = float("inf")
    q, scale = quantize_per_token(x)
    q_ref, scale_ref = quantize_per_token_ref(x)
    assert torch.equal(q, q_ref)
    assert torch.equal(scale, scale_ref)


def test_c31_error_is_at_most_half_a_step_and_every_row_uses_all_codes(device):
    w = torch.randn(64, 256, device=device)
    q, scale = quantize_per_channel(w)
    error = (dequantize(q, scale) - w).abs().amax(dim=1, keepdim=True)
    assert (error <= scale / 2 * 1.001).all()
    assert (q.int().abs().amax(dim=1) == 127).all()
    assert q.min() >= -127


@pytest.mark.parametrize("scale_dims", [1, 2])
def test_c36_scale_belongs_to_the_output_channel(scale_dims, device):
    def values(codes, steps):
        scale = torch.tensor(steps, device=device) / 127
        q = torch.tensor(codes, dtype=torch.int8, device=device)
        return dequantize(q, scale if scale_dims == 1 else scale[:, None])

    square = values([[127, 127], [127, 127]], [1.0, 10.0])
    torch.testing.assert_close(square, torch.tensor([[1.0, 1], [10, 10]], device=device))
    wide = values([[127, 0], [0, 127], [127, 127], [127, -127]], [1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(wide, torch.tensor([[1.0, 0], [0, 2], [3, 3], [4, -4]], device=device))


def test_row_alone_and_in_any_batch_has_the_same_bits(device):
    x = torch.randn(5, 300, device=device)
    q, scale = quantize_per_token(x)
    for m in range(5):
        alone = quantize_per_token(x[m : m + 1])
        assert torch.equal(alone[0], q[m : m + 1])
        assert torch.equal(alone[1], scale[m : m + 1])


def test_leading_dimensions_and_any_row_stride(device):
    x = torch.randn(3, 4, 50, device=device).transpose(0, 1)[:, :, 8:40]  # [4, 3, 32], rows that no view can flatten
    q, scale = quantize_per_token(x)
    q_ref, scale_ref = quantize_per_token_ref(x.contiguous())
    assert q.shape == (4, 3, 32)
    assert q.is_contiguous()
    assert torch.equal(q, q_ref)
    assert torch.equal(scale, scale_ref)
    broadcast = quantize_per_token(x[0, :1].expand(3, 32))[0]
    assert torch.equal(broadcast, q[0, :1].expand(3, 32))


def test_experts_quantize_as_their_rows_do(device):
    w = torch.randn(3, 8, 40, dtype=torch.bfloat16, device=device)
    q, scale = quantize_per_channel(w)
    assert scale.shape == (3, 8, 1)
    for e in range(3):
        one = quantize_per_channel(w[e])
        assert torch.equal(q[e], one[0])
        assert torch.equal(scale[e], one[1])
    torch.testing.assert_close(dequantize(q, scale.squeeze(-1)), w.float(), rtol=0, atol=scale.max().item() / 2 * 1.001)


def test_codes_come_from_fp32_arithmetic_whatever_the_input_is(device):
    x = torch.tensor([[1.0, 0.0827559]], device=device)  # 10.51 steps; rounded to bf16 first it would be 10.49
    assert quantize_per_token(x)[0].tolist() == [[127, 11]]
    half = torch.tensor([[257.0 / 256, 1.0]], device=device).to(
        torch.float16
    )  # 126.506 steps; in fp16 it is 126.5, a tie
    assert quantize_per_token(half)[0].tolist() == [[127, 127]]


def test_factor_is_one_correctly_rounded_division(device):
    # 127 * (1 / amax) rounds twice, and would give the codes 78 and 86.
    x = torch.tensor(
        [[1.4387779235839844, 0.8893234133720398], [1.3075371980667114, 0.8802710175514221]], device=device
    )
    assert quantize_per_token(x)[0].tolist() == [[127, 79], [127, 85]]


def test_dequantize_rounds_once(device):
    q = torch.tensor([[127, 3]], dtype=torch.int8, device=device)
    scale = torch.tensor([[0.0123456]], device=device)
    assert torch.equal(dequantize(q, scale, torch.bfloat16), (q.float() * scale).to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 64)])
def test_no_tokens(shape, device):
    q, scale = quantize_per_token(torch.empty(shape, dtype=torch.bfloat16, device=device))
    assert (q.shape, q.dtype) == (shape, torch.int8)
    assert (scale.shape, scale.dtype) == ((*shape[:-1], 1), torch.float32)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20), K=st.integers(1, 200))
def test_a_power_of_two_changes_no_code(seed, exponent, K):
    x = torch.randn(1, K, generator=torch.Generator().manual_seed(seed))
    q, scale = quantize_per_token(x)
    q_scaled, scale_scaled = quantize_per_token(x * 2.0**exponent)
    assert torch.equal(q_scaled, q)
    assert torch.equal(scale_scaled, scale * 2.0**exponent)


@settings(max_examples=25, deadline=None)
@given(row=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=64))
def test_any_finite_row_is_met_within_half_a_step(row):
    x = torch.tensor([row])
    q, scale = quantize_per_token(x)
    assert q.min() >= -127
    assert ((q.double() * scale.double() - x.double()).abs() <= scale.double() * 0.5001).all()


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.zeros(2, 4, dtype=torch.int8), r"x must be bfloat16 or float16 or float32 \[M, K\].*got int8 \[2, 4\]"),
        (torch.zeros(4), r"x must be .*\[M, K\].*got float32 \[4\]"),
        (torch.zeros(8, 4).t(), r"x must be .*contiguous rows, got float32 \[4, 8\], strides \(1, 4\)"),
        (torch.zeros(2, 3, 4).transpose(1, 2), r"x must be .*contiguous rows, got float32 \[2, 4, 3\]"),
        (torch.zeros(3, 0), r"x must have rows of one value or more, got shape \[3, 0\]"),
    ],
)
def test_wrong_input_is_named(x, message):
    with pytest.raises(ValueError, match=message):
        quantize_per_token(x)


def test_wrong_weight_and_scale_are_named():
    with pytest.raises(ValueError, match=r"w must be .*\[N, K\].*got float32 \[1, 2, 3, 4\]"):
        quantize_per_channel(torch.zeros(1, 2, 3, 4))
    q = torch.zeros(2, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scale must be float32 \[2, 1\].*got float32 \[1, 3\]"):
        dequantize(q, torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"scale must be float32 \[2\].*got float32 \[3\]"):
        dequantize(q, torch.zeros(3))
    with pytest.raises(ValueError, match=r"scale must be float32 .*got bfloat16"):
        dequantize(q, torch.zeros(2, 1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"q must be int8 .*got float32"):
        dequantize(torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.parametrize("rows", ["contiguous", "strided"])
def test_operator_is_registered_right(rows, device):
    x = torch.randn(3, 40, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.moe_int8.quantize_per_token.default, (x if rows == "contiguous" else x[:, :32],))


def test_codes_of_overlapping_rows_are_contiguous(device):
    x = torch.randn(72, device=device).as_strided((5, 64), (1, 1))
    assert quantize_per_token(x)[0].is_contiguous()
