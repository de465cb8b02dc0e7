import pytest
import torch
import torch.nn.functional as F

from moe_int8.activation import silu_and_mul, silu_and_mul_quantize, silu_and_mul_quantize_ref, silu_and_mul_ref, swiglu
from moe_int8.quantize import quantize_per_token

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def test_silu_of_one(device):
    h = silu_and_mul(torch.tensor([[1.0, 1.0, 0.0, 1.0, 100.0, 5.0]], device=device))  # gate 1 1 0, up 1 100 5
    assert h.tolist() == [pytest.approx([0.731059, 73.1059, 0.0], rel=1e-6)]


def test_large_gates_saturate_without_nan(device):
    gate_up = torch.tensor([[-200.0, 200.0, -88.0, 3.0, 3.0, 1.0]], device=device)
    h = silu_and_mul(gate_up)
    assert h[0, 0] == 0
    assert h[0, 1] == 600
    assert h[0, 2].item() == pytest.approx(-88 * 6.0546e-39, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_silu_times_up_within_the_rounding(dtype, device):
    gate_up = (4 * torch.randn(4, 600, device=device)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = F.silu(gate) * up
    # One rounding to dtype, on top of a few fp32 ulp for exp, the sum, the quotient and the product.
    torch.testing.assert_close(silu_and_mul(gate_up).double(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=6e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M, width", [(1, 2), (3, 130), (2, 4096), (1, 2 * 18432)])
def test_fused_equals_unfused_bit_for_bit(M, width, dtype, device):
    gate_up = (3 * torch.randn(M, width, device=device)).to(dtype)
    q, scale = silu_and_mul_quantize(gate_up)
    q_unfused, scale_unfused = quantize_per_token(silu_and_mul(gate_up))
    assert torch.equal(q, q_unfused)
    assert torch.equal(scale, scale_unfused)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_differs_from_reference_by_exp_alone(dtype, device):
    gate_up = (3 * torch.randn(8, 1024, device=device)).to(dtype)
    h, h_ref = silu_and_mul(gate_up), silu_and_mul_ref(gate_up)
    # exp differs by 2 ulp or less, plus |gate| * 2^-24 where it is computed as a power of two.
    torch.testing.assert_close(h.float(), h_ref.float(), rtol=torch.finfo(dtype).eps + 2e-6, atol=1e-7)
    q, scale = silu_and_mul_quantize(gate_up)
    q_ref, scale_ref = silu_and_mul_quantize_ref(gate_up)
    torch.testing.assert_close(scale, scale_ref, rtol=torch.finfo(dtype).eps + 2e-6, atol=0)
    difference = (q.int() - q_ref.int()).abs()
    assert difference.max() <= 1
    assert difference.count_nonzero() <= q.numel() // 100


def test_rounds_once_to_the_input_dtype_before_quantizing(device):
    gate_up = torch.tensor([[8.0, 30.0, 1.0, 1.0]], dtype=torch.bfloat16, device=device)  # h: 7.9973, 30
    assert silu_and_mul(gate_up).tolist() == [[8.0, 30.0]]
    q, scale = silu_and_mul_quantize(torch.cat([gate_up, gate_up]))
    assert torch.equal(q, quantize_per_token(torch.tensor([[8.0, 30.0]] * 2, device=device))[0])
    assert torch.equal(scale, quantize_per_token(torch.tensor([[8.0, 30.0]] * 2, device=device))[1])


def test_one_formula_whatever_the_position():
    gate = torch.full((37,), 1.2345)  # 37: a vectorised part and a scalar tail on every CPU
    h = swiglu(gate, torch.ones(37))
    assert (h == h[0]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_c28_non_finite_row_shows_and_touches_no_other(bad, device):
    gate_up = torch.randn(2, 64, device=device)
    clean_q, clean_scale = silu_and_mul_quantize(gate_up)
    gate_up[0, 40] = bad
    q, scale = silu_and_mul_quantize(gate_up)
    assert not q[0].any()
    assert not scale[0].isfinite()
    assert torch.equal(q[1], clean_q[1])
    assert torch.equal(scale[1], clean_scale[1])


def test_leading_dimensions_and_any_row_stride(device):
    gate_up = torch.randn(3, 4, 70, device=device).transpose(0, 1)[:, :, 6:]  # [4, 3, 64]
    flat = gate_up.reshape(12, 64)
    assert torch.equal(silu_and_mul(gate_up), silu_and_mul(flat).view(4, 3, 32))
    for out, out_flat in zip(silu_and_mul_quantize(gate_up), silu_and_mul_quantize(flat), strict=True):
        assert torch.equal(out, out_flat.view(4, 3, -1))
    wide = torch.randn(5, 100, device=device)
    assert torch.equal(silu_and_mul(wide[:, :64]), silu_and_mul(wide[:, :64].contiguous()))


def test_no_tokens(device):
    gate_up = torch.empty(0, 2, 64, dtype=torch.bfloat16, device=device)
    assert silu_and_mul(gate_up).shape == (0, 2, 32)
    q, scale = silu_and_mul_quantize(gate_up)
    assert (q.shape, scale.shape) == ((0, 2, 32), (0, 2, 1))


@pytest.mark.parametrize("operator", [silu_and_mul, silu_and_mul_quantize])
@pytest.mark.parametrize(
    "gate_up, message",
    [
        (torch.zeros(2, 7), r"gate_up must have rows of an even width.*got shape \[2, 7\]"),
        (torch.zeros(2, 0), r"gate_up must have rows of one value or more"),
        (torch.zeros(2, 8, dtype=torch.int8), r"gate_up must be .*got int8 \[2, 8\]"),
        (torch.zeros(8, 2).t(), r"gate_up must be .*contiguous rows"),
    ],
)
def test_wrong_input_is_named(gate_up, message, operator):
    with pytest.raises(ValueError, match=message):
        operator(gate_up)


@pytest.mark.parametrize("name", ["silu_and_mul", "silu_and_mul_quantize"])
def test_operator_is_registered_right(name, device):
    operator = getattr(torch.ops.moe_int8, name).default
    gate_up = torch.randn(3, 48, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(operator, (gate_up,))
    torch.library.opcheck(operator, (gate_up[:, :32],))
