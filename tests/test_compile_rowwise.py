"""The row-wise kernels compile for every card at DeepSeek's sizes, without spills and without contraction."""

import pytest

pytest.importorskip("triton")

from compile_for import ARCHS, check_fits, check_not_contracted, compile_for, facts, needs_compiler

from moe_int8.kernels.grouped_topk import NUM_WARPS, _grouped_topk_kernel, routing_blocks
from moe_int8.kernels.quantize import _quantize_per_token_kernel
from moe_int8.kernels.rms_norm import _rms_norm_kernel, _rms_norm_quantize_kernel
from moe_int8.kernels.rows import row_options
from moe_int8.kernels.silu_mul_quantize import _silu_and_mul_kernel, _silu_and_mul_quantize_kernel

pytestmark = needs_compiler

QUANTIZE = (_quantize_per_token_kernel, {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "stride_xm": "i32"})
SILU = (_silu_and_mul_kernel, {"gate_up_ptr": "*bf16", "h_ptr": "*bf16", "stride_gate_up_m": "i32"})
SILU_QUANTIZE = (
    _silu_and_mul_quantize_kernel,
    {"gate_up_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "stride_gate_up_m": "i32"},
)
NORM_INPUTS = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "stride_xm": "i32", "stride_residual_m": "i32"}
RESIDUALS = {"residual_ptr": "*bf16", "new_residual_ptr": "*bf16"}
NORM = (_rms_norm_kernel, NORM_INPUTS | {"y_ptr": "*bf16"})
NORM_QUANTIZE = (_rms_norm_quantize_kernel, NORM_INPUTS | {"q_ptr": "*i8", "scale_ptr": "*fp32"})
NO_RESIDUAL = dict.fromkeys(RESIDUALS)


def compile_rows(kernel, types, constants, width, arch):
    options = row_options(width)
    constants = constants | {"K": width, "BLOCK": options.pop("BLOCK")}
    return facts(compile_for(kernel, arch, types, constants, div16=types, **options))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "kernel, types, constants, width",
    [
        pytest.param(*QUANTIZE, {}, 7168, id="quantize-hidden"),
        pytest.param(*QUANTIZE, {}, 18432, id="quantize-several-blocks"),
        pytest.param(*SILU, {}, 18432, id="silu"),
        pytest.param(*SILU_QUANTIZE, {}, 2048, id="silu-quantize-expert"),
        pytest.param(*SILU_QUANTIZE, {}, 18432, id="silu-quantize-several-blocks"),
        pytest.param(NORM[0], NORM[1] | RESIDUALS, {"EPS": 1e-6}, 7168, id="norm-residual"),
        pytest.param(*NORM_QUANTIZE, NO_RESIDUAL | {"EPS": 1e-6}, 1536, id="norm-quantize-q-a"),
        pytest.param(NORM_QUANTIZE[0], NORM_QUANTIZE[1] | RESIDUALS, {"EPS": 1e-6}, 7168, id="norm-quantize-residual"),
    ],
)
def test_row_kernel_fits_and_is_not_contracted(kernel, types, constants, width, arch):
    found = compile_rows(kernel, types, constants, width, arch)
    check_fits(found, arch)
    check_not_contracted(found)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "sizes, softmax",
    [
        pytest.param({"E": 256, "N_GROUP": 8, "TOPK_GROUP": 4, "TOP_K": 8}, False, id="V3"),
        pytest.param({"E": 160, "N_GROUP": 8, "TOPK_GROUP": 3, "TOP_K": 6}, True, id="V2"),
    ],
)
def test_router_fits_and_is_not_contracted(sizes, softmax, arch):
    types = {"logits_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "stride_logits_m": "i32"}
    types |= {"routed_scaling_factor": "fp32"}
    constants = sizes | routing_blocks(sizes["E"], sizes["N_GROUP"], sizes["TOP_K"])
    constants |= {"RENORMALIZE": not softmax, "SOFTMAX": softmax, "TOP2_SUM": not softmax}
    if softmax:
        constants["bias_ptr"] = None
    else:
        types["bias_ptr"] = "*fp32"
    pointers = [name for name in types if name.endswith("_ptr")]
    compiled = compile_for(
        _grouped_topk_kernel, arch, types, constants, div16=pointers, num_warps=NUM_WARPS, enable_fp_fusion=False
    )
    found = facts(compiled)
    check_fits(found, arch)
    check_not_contracted(found)


def test_contraction_is_seen_where_it_is_allowed():
    types = QUANTIZE[1]
    compiled = compile_for(*QUANTIZE[:1], 80, types, {"K": 1024, "BLOCK": 1024}, div16=types, enable_fp_fusion=True)
    assert facts(compiled).fp32_fma > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_of_one_block_is_read_once(arch):
    found = compile_rows(*QUANTIZE, {}, 7168, arch)
    # 16 warps, 8 bf16 a load: the second pass has no loads of its own.
    assert found.global_loads == 8192 // (16 * 32) // 8
