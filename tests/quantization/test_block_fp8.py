import pytest
import torch

from moe_int8.quantization.block_fp8 import dequantize_block_fp8, fp8_to_float32, quantize_block_fp8


def test_every_code_becomes_the_float_that_torch_makes_of_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for part in (codes, codes[:127], codes[:0], codes.view(2, 128)[:, 3:7]):  # with and without NaN, none, a view
        values, expected = fp8_to_float32(part), part.float()
        assert torch.equal(values.isnan(), expected.isnan())
        assert torch.equal(values.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))


def test_c29_each_block_is_multiplied_by_its_own_scale():
    weight = torch.ones(1, 256).to(torch.float8_e4m3fn)
    w = dequantize_block_fp8(weight, torch.tensor([[1.0, 0.25]]))
    assert w.dtype == torch.float32
    assert w.tolist() == [[1.0] * 128 + [0.25] * 128]


@pytest.mark.parametrize("N, K", [(576, 160), (128, 128), (1, 1), (130, 257)])  # 576: kv_a_proj, 4.5 rows of blocks
def test_ragged_edges_take_the_scale_of_their_own_block(N, K):
    weight = torch.randn(N, K).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-N // 128), -(-K // 128)) + 0.5
    n, k = torch.arange(N) // 128, torch.arange(K) // 128
    assert torch.equal(dequantize_block_fp8(weight, scale), weight.float() * scale[n][:, k])


def test_other_block_sizes():
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    w = dequantize_block_fp8(torch.ones(3, 5).to(torch.float8_e4m3fn), scale, block=(2, 4))
    assert w.tolist() == [[1, 1, 1, 1, 2]] * 2 + [[3, 3, 3, 3, 4]]


def test_a_scale_of_another_shape_is_refused_with_both_shapes():
    weight = torch.ones(576, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"must be \[5, 2\] for a weight \[576, 256\].*got \[4, 2\]"):
        dequantize_block_fp8(weight, torch.ones(4, 2))


def test_a_weight_that_is_not_fp8_is_refused():
    with pytest.raises(ValueError, match=r"weight must be float8_e4m3fn \[N, K\].*got bfloat16"):
        dequantize_block_fp8(torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantizing_rounds_to_the_nearest_e4m3_code(dtype):
    w = torch.randn(200, 300, dtype=dtype)
    weight, scale = quantize_block_fp8(w)
    assert weight.float()[:128, :128].abs().max() == 448  # a block's largest value takes the largest code
    assert weight.float()[128:, 256:].abs().max() == 448
    error = (dequantize_block_fp8(weight, scale) - w.float()).abs()
    expanded = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    # Three mantissa bits: half of a code's last place is 2^-4 of the value, below 2^-6 codes are 2^-9 apart.
    assert (error <= torch.maximum(w.float().abs() * 2**-4, expanded * 2**-10) * 1.001).all()


def test_a_zero_block_gives_zeros_and_a_usable_scale():
    w = torch.zeros(128, 256)
    w[:, 128:] = 2.0
    weight, scale = quantize_block_fp8(w)
    assert torch.equal(dequantize_block_fp8(weight, scale)[:, :128], torch.zeros(128, 128))
    assert scale.isfinite().all()
    assert (scale > 0).all()
