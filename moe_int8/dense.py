"""Dense w8a8: y = (int32 sum as fp32) * scale of the token * scale of the output channel (+ bias), rounded once."""

import torch

from moe_int8.check import check_accumulator, check_tensor
from moe_int8.custom_op import custom_op
from moe_int8.dispatch import use_triton
from moe_int8.numerics import ACTIVATION_DTYPES, FP32_ACCUMULATE_EVERY, INT32_MAX_K
from moe_int8.quantize import quantize_per_token


def w8a8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulator: str = "int32",
) -> torch.Tensor:
    """x @ weight.T + bias with activations quantized per token: `quantize_per_token`, then `int8_scaled_mm`.

    Args:
        x: [..., K] bf16, fp16 or fp32; or int8 codes, whose scales are `x_scale`.
        weight: [N, K] int8 codes, rows contiguous.
        weight_scale: [N, 1] or [N] fp32, one for each output channel.
        bias: [N] bf16, fp16 or fp32, or None; added after both scales.
        x_scale: [..., 1] or [...] fp32, with int8 x only.
        out_dtype: None: x's dtype, and bf16 for int8 x.
        accumulator: see `int8_scaled_mm`.

    Returns:
        [..., N] `out_dtype`.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    if x_scale is None:
        q, x_scale = quantize_per_token(x)
    else:
        check_tensor("x (with x_scale)", x, ["..."] * max(x.ndim - 1, 1) + ["K"], torch.int8)
        q = x
    out_dtype = out_dtype or (torch.bfloat16 if x.dtype == torch.int8 else x.dtype)
    return int8_scaled_mm(q, weight, x_scale, weight_scale, bias, out_dtype=out_dtype, accumulator=accumulator)


def int8_scaled_mm(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    accumulator: str = "int32",
) -> torch.Tensor:
    """Multiply quantized activations by a quantized weight.

    y[m, n] = float32(sum_k q[m, k] * weight[n, k]) * scale[m] * weight_scale[n] (+ bias[n]), every step rounded to
    fp32 in this order, then cast once to `out_dtype`.

    Args:
        q: [..., K] int8 codes of the activations, rows contiguous.
        weight: [N, K] int8 codes, rows contiguous.
        scale: [..., 1] or [...] fp32, one for each row of q.
        weight_scale: [N, 1] or [N] fp32, one for each output channel.
        bias: [N] bf16, fp16 or fp32, or None.
        out_dtype: bf16, fp16 or fp32.
        accumulator: "int32": exact; K is at most 133,144 (132,104 where a foreign weight holds -128, which is not
            checked). "fp32": one exact int32 dot for each 128 of K, converted to fp32 and added in order.

    Returns:
        [..., N] `out_dtype`.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
    """
    check_accumulator(accumulator)
    check_out_dtype(out_dtype)
    check_tensor("q", q, ["..."] * max(q.ndim - 1, 1) + ["K"], torch.int8)
    rows, K = q.shape[:-1], q.shape[-1]
    check_sum_fits(K, accumulator)
    check_tensor("weight", weight, ("N", K), torch.int8, device=q.device)
    N = weight.shape[0]
    scale = flat_scale("scale", scale, rows, q.device)
    weight_scale = flat_scale("weight_scale", weight_scale, (N,), q.device)
    if bias is not None:
        check_tensor("bias", bias, (N,), ACTIVATION_DTYPES, device=q.device)
    y = _int8_scaled_mm(q.flatten(0, -2), weight, scale, weight_scale, bias, out_dtype, accumulator)
    return y.view(*rows, N)


def int8_scaled_mm_ref(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    accumulator: str = "int32",
) -> torch.Tensor:
    """The definition of `int8_scaled_mm` in plain torch, which every implementation equals bit for bit."""
    K = q.shape[-1]
    step = FP32_ACCUMULATE_EVERY if accumulator == "fp32" else max(K, 1)
    y = torch.zeros((*q.shape[:-1], weight.shape[0]), dtype=torch.float32, device=q.device)
    for k in range(0, K, step):
        y += (q[..., k : k + step].double() @ weight[:, k : k + step].double().T).float()  # exact: far below 2^53
    y = y * scale.reshape(*q.shape[:-1], 1) * weight_scale.reshape(-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def int8_matmul_cpu(q: torch.Tensor, weight: torch.Tensor, accumulator: str) -> torch.Tensor:
    """q [M, K] @ weight [N, K].T as fp32 [M, N] on a CPU, summed as `accumulator` says."""
    K = q.shape[1]
    if accumulator == "int32" or K <= FP32_ACCUMULATE_EVERY:
        return _int_mm(q, weight).float()
    total = torch.zeros((q.shape[0], weight.shape[0]), dtype=torch.float32)
    for k in range(0, K, FP32_ACCUMULATE_EVERY):
        total += _int_mm(q[:, k : k + FP32_ACCUMULATE_EVERY], weight[:, k : k + FP32_ACCUMULATE_EVERY])
    return total


def flat_scale(name: str, scale: torch.Tensor, rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Check the fp32 scale of each of `rows`, with or without a last dimension of one, and make it flat."""
    with_one = scale.ndim == len(rows) + 1
    check_tensor(name, scale, (*rows, 1) if with_one else rows, torch.float32, device=device, contiguous_rows=False)
    return scale.reshape(-1).contiguous()


def check_sum_fits(K: int, accumulator: str) -> None:
    """Raise ValueError where a sum of K products of codes might not fit int32."""
    if accumulator == "int32" and K > INT32_MAX_K:
        raise ValueError(f"K must be at most {INT32_MAX_K} with accumulator 'int32', got {K}; use 'fp32'")


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Raise ValueError unless operators can write this dtype."""
    if out_dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"out_dtype must be one of {', '.join(map(str, ACTIVATION_DTYPES))}, got {out_dtype}")


@custom_op("int8_scaled_mm")
def _int8_scaled_mm(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulator: str,
) -> torch.Tensor:
    if use_triton(q):
        from moe_int8.kernels.gemm import launch_int8_scaled_mm
        from moe_int8.tuning import dense_config

        (M, K), N = q.shape, weight.shape[0]
        config = dense_config(M, N, K, q.device, accumulator)
        with torch.cuda.device_of(q):
            return launch_int8_scaled_mm(q, weight, scale, weight_scale, bias, out_dtype, accumulator, config)
    y = int8_matmul_cpu(q, weight, accumulator).mul_(scale[:, None]).mul_(weight_scale)
    if bias is not None:
        y += bias.float()
    return y.to(out_dtype)


@_int8_scaled_mm.register_fake
def _(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulator: str,
) -> torch.Tensor:
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=out_dtype)


def _int_mm(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch._int_mm, which (seen with 2.13) reads other memory for a single K and for rows that overlap or repeat."""
    if q.shape[1] == 1:
        return q.int() * weight.int().T
    return torch._int_mm(_with_plain_rows(q), _with_plain_rows(weight).T)


def _with_plain_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied where its rows overlap or repeat; a single row's stride is anything, and `contiguous` believes it."""
    plain = x.shape[0] > 1 and x.stride(0) >= x.shape[1]
    return x if plain else x.clone(memory_format=torch.contiguous_format)
