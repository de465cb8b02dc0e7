"""int8_scaled_mm and w8a8_linear: equal bits on every path, shapes, strides, and the cases C12, C14, C32 to C35."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_int8.dense import int8_scaled_mm, int8_scaled_mm_ref, w8a8_linear
from moe_int8.numerics import ACCUMULATORS, FP32_ACCUMULATE_EVERY
from moe_int8.quantize import quantize_per_token_ref
from moe_int8.tuning import CONFIG_DIR_VARIABLE, LaunchConfig, config_file_name, dense_config, save_configs


def codes(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)


def ints(rows: list, device: str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int8, device=device)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "M, N, K",
    [(1, 3, 5), (17, 70, 257), (3, 4, 1), (40, 130, 129), (130, 64, 128), (1, 576, 896), (2, 3, 0), (3, 0, 5)],
)
def test_equals_definition_bit_for_bit(M, N, K, out_dtype, accumulator, device):
    q, weight = codes(M, K, device=device), codes(N, K, device=device)
    scale, weight_scale = torch.rand(M, 1, device=device) / 64, torch.rand(N, 1, device=device) / 64
    bias = torch.randn(N, device=device).to(out_dtype)
    options = {"out_dtype": out_dtype, "accumulator": accumulator}
    for bias_or_none in (bias, None):
        y = int8_scaled_mm(q, weight, scale, weight_scale, bias_or_none, **options)
        assert y.dtype == out_dtype
        assert torch.equal(y, int8_scaled_mm_ref(q, weight, scale, weight_scale, bias_or_none, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize(
    "M, N, K", [(1, 7168, 2048), (33, 2112, 7168), (300, 7168, 18432), (5, 64, 7168), (129, 576, 7168)]
)
def test_model_shapes_equal_the_cpu_bit_for_bit(M, N, K, accumulator):
    q, weight = codes(M, K, device="cpu"), codes(N, K, device="cpu")
    scale, weight_scale = torch.rand(M, 1) / 64, torch.rand(N, 1) / 64
    options = {"out_dtype": torch.bfloat16, "accumulator": accumulator}
    on_gpu = int8_scaled_mm(q.cuda(), weight.cuda(), scale.cuda(), weight_scale.cuda(), **options)
    assert torch.equal(on_gpu.cpu(), int8_scaled_mm(q, weight, scale, weight_scale, **options))


def test_c12_int32_is_the_exact_sum_rounded_once(device):
    q = torch.randint(100, 128, (3, 4096), dtype=torch.int8, device=device)
    weight = torch.randint(100, 128, (5, 4096), dtype=torch.int8, device=device)
    one, ones = torch.ones(3, 1, device=device), torch.ones(5, device=device)
    exact = q.cpu().long() @ weight.cpu().long().T
    y = int8_scaled_mm(q, weight, one, ones, out_dtype=torch.float32).cpu()
    assert torch.equal(y, exact.float())

    # The switch rounds after every 128 of K instead, so sums above 2^24 lose bits on the way.
    stepwise = torch.zeros(3, 5)
    for k in range(0, 4096, FP32_ACCUMULATE_EVERY):
        block = slice(k, k + FP32_ACCUMULATE_EVERY)
        stepwise += (q.cpu()[:, block].long() @ weight.cpu()[:, block].long().T).float()
    y = int8_scaled_mm(q, weight, one, ones, out_dtype=torch.float32, accumulator="fp32").cpu()
    assert torch.equal(y, stepwise)
    assert not torch.equal(stepwise, exact.float())


@pytest.mark.parametrize("K, fp32_sum", [(1041, 16_790_288.0), (133_144, 2_147_479_552.0)])
def test_c12_largest_codes_do_not_overflow(K, fp32_sum, device):
    q = torch.full((1, K), 127, dtype=torch.int8, device=device)
    one = torch.ones(1, 1, device=device)
    assert int8_scaled_mm(q, q, one, one, out_dtype=torch.float32).item() == fp32_sum


def test_c14_activations_are_quantized_too(device):
    x = torch.tensor([[1.0, 0.003]], device=device)  # 0.003 is below half a step of 1 / 127
    assert w8a8_linear(x, ints([[0, 127]], device), torch.ones(1, 1, device=device)).item() == 0.0


@pytest.mark.parametrize("M", [0, 1, 17])
def test_c32_any_number_of_tokens(M, device):
    q = ints([[1, 2, 3, 4, 5]] * M, device).reshape(M, 5)
    weight = ints([[1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [2, 2, 2, 2, 2]], device)
    y = int8_scaled_mm(
        q,
        weight,
        torch.full((M, 1), 0.5, device=device),
        torch.tensor([1, 2, 0.1], device=device),
        out_dtype=torch.float32,
    )
    assert y.shape == (M, 3)
    torch.testing.assert_close(y, torch.tensor([[3.0, 6.0, 1.5]], device=device).expand(M, 3), rtol=1e-6, atol=0)


def test_c33_narrow_shard_of_a_wide_layer(device):
    q, weight = codes(2, 7168, device=device), codes(64, 7168, device=device)
    one, ones = torch.ones(2, 1, device=device), torch.ones(64, 1, device=device)
    exact = (q.cpu().long() @ weight.cpu().long().T).float()
    assert torch.equal(int8_scaled_mm(q, weight, one, ones, out_dtype=torch.float32).cpu(), exact)


def test_c34_weight_is_stored_out_by_in(device):
    q, weight, one = ints([[1, -1]], device), ints([[1, 2], [3, 4]], device), torch.ones(1, 1, device=device)
    ones = torch.ones(2, device=device)
    assert int8_scaled_mm(q, weight, one, ones, out_dtype=torch.float32).tolist() == [[-1.0, -1.0]]
    with pytest.raises(ValueError, match=r"weight must be .* contiguous rows.*strides \(1, 2\)"):
        int8_scaled_mm(q, weight.T, one, ones, out_dtype=torch.float32)


def test_c35_bias_comes_after_both_scales_and_once(device):
    q, weight = ints([[1, 2, 3, 4]], device), ints([[1, 1, 1, 1], [4, 3, 0, 0]], device)
    scale, weight_scale = torch.tensor([[0.5]], device=device), torch.tensor([[2.0], [4.0]], device=device)
    bias = torch.tensor([1.0, -1.0], device=device)
    y = int8_scaled_mm(q, weight, scale, weight_scale, bias, out_dtype=torch.float32)
    assert y.tolist() == [[11.0, 19.0]]
    left = int8_scaled_mm(q[:, :2], weight[:, :2], scale, weight_scale, bias, out_dtype=torch.float32)
    right = int8_scaled_mm(q[:, 2:], weight[:, 2:], scale, weight_scale, out_dtype=torch.float32)
    assert (left + right).tolist() == [[11.0, 19.0]]


def test_c01_row_offsets_are_64_bit(device, tmp_path: Path):
    stride, K = 2**30, 32  # row 2 begins at byte 2^31
    if device == "cuda":
        storage = torch.empty(2 * stride + K, dtype=torch.int8, device=device)
    else:  # a sparse file: only the pages in use exist
        storage = torch.from_numpy(np.memmap(tmp_path / "rows", dtype=np.int8, mode="w+", shape=2 * stride + K))
    rows = storage.as_strided((3, K), (stride, 1))
    rows.copy_(codes(3, K, device=device))
    few, ones = codes(4, K, device=device), torch.ones(4, device=device)
    for q, weight in ((rows, few), (few, rows)):
        exact = (q.cpu().long() @ weight.cpu().long().T).float()
        y = int8_scaled_mm(q, weight, ones[: len(q)], ones[: len(weight)], out_dtype=torch.float32)
        assert torch.equal(y.cpu(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_linear_is_quantize_then_matmul(dtype, device):
    x = torch.randn(2, 3, 96, dtype=dtype, device=device)[..., :80]  # three dimensions, rows apart
    weight, weight_scale = codes(48, 96, device=device)[:, :80], torch.rand(48, 1, device=device)
    bias = torch.randn(48, dtype=dtype, device=device)
    q, scale = quantize_per_token_ref(x)
    y = w8a8_linear(x, weight, weight_scale, bias)
    assert y.shape == (2, 3, 48)
    assert torch.equal(y, int8_scaled_mm_ref(q, weight, scale, weight_scale, bias, out_dtype=dtype))
    assert torch.equal(y, w8a8_linear(q, weight, weight_scale[:, 0], bias, x_scale=scale[..., 0], out_dtype=dtype))
    assert w8a8_linear(q, weight, weight_scale, x_scale=scale).dtype == torch.bfloat16


def test_nan_token_touches_no_other(device):
    x, weight, weight_scale = (
        torch.randn(3, 64, device=device),
        codes(16, 64, device=device),
        torch.rand(16, device=device),
    )
    clean = w8a8_linear(x, weight, weight_scale)
    x[1, 5] = float("nan")
    y = w8a8_linear(x, weight, weight_scale)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_a_token_has_the_same_bits_alone_in_any_batch_and_tile(accumulator, device, tmp_path, monkeypatch):
    N, K = 72, 384
    x = torch.randn(300, K, dtype=torch.bfloat16, device=device)
    weight, weight_scale = codes(N, K, device=device), torch.rand(N, device=device)
    whole = w8a8_linear(x, weight, weight_scale, accumulator=accumulator)
    for tokens in (slice(299, 300), slice(100, 107)):
        assert torch.equal(w8a8_linear(x[tokens], weight, weight_scale, accumulator=accumulator), whole[tokens])
    for number, config in enumerate([LaunchConfig(16, 32, 256, 2, 2, 2), LaunchConfig(128, 64, 64, 1, 4, 3)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_configs(folder / config_file_name(device_name(device), N=N, K=K), {1: config})
        monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(folder))
        assert dense_config(140, N, K, x.device, "int32") == config
        assert torch.equal(w8a8_linear(x[:140], weight, weight_scale, accumulator=accumulator), whole[:140])


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_custom_op_keeps_its_promises(accumulator, device):
    arguments = (codes(3, 40, device=device), codes(8, 40, device=device), torch.rand(3, device=device))
    arguments += (torch.rand(8, device=device), torch.randn(8, device=device), torch.bfloat16, accumulator)
    torch.library.opcheck(torch.ops.moe_int8.int8_scaled_mm.default, arguments)


def test_errors_name_the_argument(device):
    x, weight, weight_scale = (
        torch.randn(2, 8, device=device),
        codes(4, 8, device=device),
        torch.rand(4, 1, device=device),
    )
    with pytest.raises(ValueError, match=r"weight must be int8 \[N, 8\].*got int8 \[4, 7\]"):
        w8a8_linear(x, weight[:, :7], weight_scale)
    with pytest.raises(ValueError, match=r"weight_scale must be float32 \[4, 1\].*got float32 \[1, 4\]"):
        w8a8_linear(x, weight, weight_scale.T)
    with pytest.raises(ValueError, match=r"weight_scale must be float32 \[4\].*got bfloat16 \[4\]"):
        w8a8_linear(x, weight, weight_scale[:, 0].bfloat16())
    with pytest.raises(ValueError, match=r"bias must be .*\[4\].*got float32 \[3\]"):
        w8a8_linear(x, weight, weight_scale, torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=r"x \(with x_scale\) must be int8"):
        w8a8_linear(x, weight, weight_scale, x_scale=torch.ones(2, 1, device=device))
    with pytest.raises(ValueError, match=r"accumulator must be one of int32, fp32, got 'int64'"):
        w8a8_linear(x, weight, weight_scale, accumulator="int64")
    with pytest.raises(ValueError, match=r"out_dtype must be one of .*got torch.int8"):
        w8a8_linear(x, weight, weight_scale, out_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"q must be int8 \[..., K\].*got int8 \[8\]"):
        int8_scaled_mm(weight[0], weight, weight_scale[:1], weight_scale, out_dtype=torch.float32)


def test_a_sum_that_might_not_fit_int32_is_refused():
    q, ones = torch.zeros(1, 133145, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match=r"K must be at most 133144 .* got 133145; use 'fp32'"):
        int8_scaled_mm(q, q, ones, ones, out_dtype=torch.float32)


@pytest.mark.parametrize("K", [1, 5, 64, 128])
@pytest.mark.parametrize("operand", ["q", "weight"])
def test_rows_that_overlap_or_repeat_are_read_as_they_are(operand, K, device):
    """Expanded rows (stride 0), overlapping rows (stride 1), a single row of any stride: all are legal views."""
    codes = torch.randint(-127, 128, (K + 8,), dtype=torch.int8, device=device)
    plain = torch.randint(-127, 128, (6, K), dtype=torch.int8, device=device)
    for rows, stride in ((5, 0), (5, 1), (1, 0), (1, 1), (1, 3)):
        view = codes.as_strided((rows, K), (stride, 1))
        q, weight = (view, plain) if operand == "q" else (plain, view)
        scale, weight_scale = torch.ones(len(q), device=device), torch.ones(len(weight), device=device)
        y = int8_scaled_mm(q, weight, scale, weight_scale, out_dtype=torch.float32)
        assert torch.equal(y, (q.double() @ weight.double().T).float())
