import pytest
import torch

from moe_int8.norm import rms_norm, rms_norm_quantize, rms_norm_quantize_ref, rms_norm_ref
from moe_int8.quantize import quantize_per_token

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def inputs(M, K, dtype, device, weight_dtype=None):
    x = torch.randn(M, K, device=device).to(dtype)
    residual = (2 * torch.randn(M, K, device=device)).to(dtype)
    weight = (1 + torch.randn(K, device=device) / 4).to(weight_dtype or dtype)
    return x, weight, residual


def test_worked_example(device):
    x = torch.tensor([[3.0, 4.0]], device=device)  # mean of the squares 12.5
    weight = torch.tensor([1.0, 2.0], device=device)
    y = rms_norm(x, weight, 0.0)
    assert y.tolist() == [pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5], rel=1e-6)]
    assert rms_norm(x, weight, 3.5).tolist() == [pytest.approx([0.75, 2.0], rel=1e-6)]  # sqrt(12.5 + 3.5) = 4


def test_residual_is_added_first_and_rounded_once(device):
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16, device=device)
    residual = torch.tensor([[2.0**-9, 3.0]], dtype=torch.bfloat16, device=device)  # 1 + 2^-9 is 1 in bf16
    y, new_residual = rms_norm(x, torch.ones(2, device=device), EPS, residual)
    assert new_residual.tolist() == [[1.0, 4.0]]
    assert torch.equal(y, rms_norm(new_residual, torch.ones(2, device=device), EPS))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M, K", [(1, 1), (3, 100), (2, 7168), (1, 18432)])  # 18432: a row of several blocks
def test_matches_reference(M, K, dtype, weight_dtype, device):
    x, weight, residual = inputs(M, K, dtype, device, weight_dtype)
    y, new_residual = rms_norm(x, weight, EPS, residual)
    y_ref, new_residual_ref = rms_norm_ref(x, weight, EPS, residual)
    assert torch.equal(new_residual, new_residual_ref)
    # The factor of a row may differ by one fp32 ulp, where its fp64 sum falls next to a rounding boundary. Such a
    # difference becomes one ulp of y's dtype.
    torch.testing.assert_close(y.float(), y_ref.float(), rtol=torch.finfo(dtype).eps, atol=0)
    assert (y != y_ref).sum() <= M * K // 100
    q, scale, new_residual = rms_norm_quantize(x, weight, EPS, residual)
    q_ref, scale_ref, _ = rms_norm_quantize_ref(x, weight, EPS, residual)
    assert torch.equal(new_residual, new_residual_ref)
    torch.testing.assert_close(scale, scale_ref, rtol=torch.finfo(dtype).eps, atol=0)
    difference = (q.int() - q_ref.int()).abs()
    assert difference.max() <= 1
    assert difference.count_nonzero() <= M * K // 100


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M, K", [(3, 100), (2, 1536), (2, 7168), (1, 18432)])
def test_fused_equals_unfused_bit_for_bit(M, K, dtype, with_residual, device):
    x, weight, residual = inputs(M, K, dtype, device)
    if with_residual:
        y, new_residual = rms_norm(x, weight, EPS, residual)
        q, scale, new_residual_fused = rms_norm_quantize(x, weight, EPS, residual)
        assert torch.equal(new_residual_fused, new_residual)
    else:
        y = rms_norm(x, weight, EPS)
        q, scale = rms_norm_quantize(x, weight, EPS)
    q_unfused, scale_unfused = quantize_per_token(y)
    assert torch.equal(q, q_unfused)
    assert torch.equal(scale, scale_unfused)


def test_row_alone_and_in_any_batch_has_the_same_bits(device):
    x, weight, residual = inputs(5, 1000, torch.bfloat16, device)
    whole = rms_norm_quantize(x, weight, EPS, residual)
    for m in range(5):
        alone = rms_norm_quantize(x[m : m + 1], weight, EPS, residual[m : m + 1])
        for one, rows in zip(alone, whole, strict=True):
            assert torch.equal(one, rows[m : m + 1])


def test_order_of_a_row_does_not_change_its_factor(device):
    x = torch.randn(4, 7168, device=device) * torch.logspace(-3, 3, 7168, device=device)
    weight = torch.ones(7168, device=device)
    assert torch.equal(rms_norm(x, weight, EPS).flip(-1), rms_norm(x.flip(-1), weight, EPS))


def test_large_values_do_not_overflow_in_their_square(device):
    x = torch.full((1, 64), 1e30, device=device)
    assert rms_norm(x, torch.ones(64, device=device), EPS).tolist() == [[pytest.approx(1.0, rel=1e-6)] * 64]


def test_c25_zero_row_is_zero_and_its_scale_finite(device):
    x = torch.zeros(1, 32, dtype=torch.bfloat16, device=device)
    weight = torch.ones(32, device=device)
    assert not rms_norm(x, weight, EPS).any()
    q, scale = rms_norm_quantize(x, weight, EPS)
    assert not q.any()
    assert scale.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_c28_non_finite_row_shows_and_touches_no_other(bad, device):
    x, weight, residual = inputs(2, 64, torch.float32, device)
    clean = rms_norm_quantize(x, weight, EPS, residual)
    x[0, 40] = bad
    q, scale, _ = dirty = rms_norm_quantize(x, weight, EPS, residual)
    assert not q[0].any()
    assert not scale[0].isfinite()
    assert not rms_norm(x, weight, EPS)[0].isfinite().all()
    for now, before in zip(dirty, clean, strict=True):
        assert torch.equal(now[1], before[1])


def test_inputs_are_left_as_they_were(device):
    x, weight, residual = inputs(2, 64, torch.bfloat16, device)
    copies = [t.clone() for t in (x, weight, residual)]
    rms_norm(x, weight, EPS, residual)
    rms_norm_quantize(x, weight, EPS, residual)
    for now, before in zip((x, weight, residual), copies, strict=True):
        assert torch.equal(now, before)


def test_leading_dimensions_and_any_row_stride(device):
    wide = torch.randn(3, 4, 80, device=device)
    x, residual = wide.transpose(0, 1)[:, :, 8:40], wide.transpose(0, 1)[:, :, 48:]  # [4, 3, 32]
    weight = torch.randn(32, device=device)
    flat = (x.reshape(12, 32), weight, EPS, residual.reshape(12, 32))
    for operator in (rms_norm, rms_norm_quantize):
        for out, out_flat in zip(operator(x, weight, EPS, residual), operator(*flat), strict=True):
            assert torch.equal(out, out_flat.view(4, 3, -1))
            assert out.is_contiguous()
    rows, dense = wide.view(12, 80)[:, 5:37], torch.randn(12, 32, device=device)
    for a, b in ((rows, dense), (dense, rows)):  # x and residual each with a stride of its own
        for operator in (rms_norm, rms_norm_quantize):
            contiguous = operator(a.contiguous(), weight, EPS, b.contiguous())
            for out, out_contiguous in zip(operator(a, weight, EPS, b), contiguous, strict=True):
                assert torch.equal(out, out_contiguous)


def test_no_tokens(device):
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    weight = torch.ones(32, device=device)
    assert [t.shape for t in rms_norm(x, weight, EPS, x)] == [(0, 32), (0, 32)]
    assert [t.shape for t in rms_norm_quantize(x, weight, EPS, x)] == [(0, 32), (0, 1), (0, 32)]


@pytest.mark.parametrize("operator", [rms_norm, rms_norm_quantize])
@pytest.mark.parametrize(
    "x, weight, residual, message",
    [
        (torch.zeros(2, 4), torch.ones(5), None, r"weight must be .*\[4\].*got float32 \[5\]"),
        (torch.zeros(2, 4), torch.ones(4, dtype=torch.int8), None, r"weight must be .*got int8 \[4\]"),
        (
            torch.zeros(2, 4),
            torch.ones(4),
            torch.zeros(1, 4),
            r"residual must be float32 \[2, 4\].*got float32 \[1, 4\]",
        ),
        (torch.zeros(2, 4), torch.ones(4), torch.zeros(2, 4).half(), r"residual must be float32 .*got float16"),
        (torch.zeros(2, 4).double(), torch.ones(4), None, r"x must be .*got float64"),
        (torch.zeros(4), torch.ones(4), None, r"x must be .*\[M, K\].*got float32 \[4\]"),
    ],
)
def test_wrong_input_is_named(x, weight, residual, message, operator):
    with pytest.raises(ValueError, match=message):
        operator(x, weight, EPS, residual)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_quantize"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_operator_is_registered_right(name, with_residual, device):
    x, weight, residual = inputs(3, 48, torch.bfloat16, device)
    rows = (x[:, :32], weight[:32], EPS, residual[:, 8:40] if with_residual else None)
    torch.library.opcheck(getattr(torch.ops.moe_int8, name).default, rows)
