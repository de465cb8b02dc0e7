"""The Gluon kernels for Hopper, compiled: tensor cores, TMA, shared memory, spills, contraction."""

from typing import Any

import pytest
import triton.language as tl
from compile_for import check_fits, check_not_contracted, compile_for, facts, needs_compiler
from triton.experimental.gluon import language as gl

from moe_int8.kernels.hopper import BLOCK_K
from moe_int8.kernels.moe_align import Alignment
from moe_int8.kernels.moe_down_hopper import BLOCK_M, _moe_down_hopper_kernel
from moe_int8.kernels.moe_gate_up_hopper import BLOCK_N, _moe_gate_up_hopper_kernel

pytestmark = needs_compiler

ROWS = {"q_ptr": "*i8", "scale_ptr": "*fp32", "num_slots": "i32", "N": "i32"}
ROWS |= {f"{name}_ptr": "*i32" for name in Alignment._fields}
NOT_MULTIPLES_OF_16 = {"num_slots", "topk", "num_ids", "num_experts", "factor"}


def compile_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int) -> Any:
    multiples = [name for name in types if name not in NOT_MULTIPLES_OF_16 and not name.endswith("_desc")]
    return facts(compile_for(kernel, 90, types, constants, multiples, num_warps=num_warps, enable_fp_fusion=False))


def descriptor(block_n: int) -> str:
    codes = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_K.value, element_bitwidth=8, rank=2)
    return f"tensordesc<i8[{block_n}, {BLOCK_K.value}],{codes!r}>"


@pytest.mark.parametrize("whole_rows", [True, False])
@pytest.mark.parametrize("block_m, stages", [(64, 5), (128, 4)])
def test_gate_up_compiles_well(block_m: int, stages: int, whole_rows: bool) -> None:
    types = ROWS | {"w13_desc": descriptor(BLOCK_N.value), "w13_scale_ptr": "*fp32", "h_scale_ptr": "*fp32"}
    types |= {"h_ptr": "*i8" if whole_rows else "*bf16", "topk": "i32", "K": "i32", "stride_qm": "i32"}
    constants = {"WHOLE_ROWS": whole_rows, "DTYPE": tl.bfloat16, "BLOCK_M": block_m, "STAGES": stages}
    found = compile_hopper(_moe_gate_up_hopper_kernel, types, constants, num_warps=block_m // 16)
    check_fits(found, 90)
    check_not_contracted(found)
    assert found.loop_int8_mma > 0
    assert found.async_copies > 0
    assert found.loop_int_to_float == 0


@pytest.mark.parametrize(
    "K, block_n, stages, slice, tiles", [(128, 128, 2, 128, 6), (128, 64, 4, 256, 6), (256, 128, 2, 128, 8)]
)
def test_down_compiles_well(K: int, block_n: int, stages: int, slice: int, tiles: int) -> None:
    types = ROWS | {"w2_desc": descriptor(block_n), "w2_scale_ptr": "*fp32", "topk_weights_ptr": "*fp32"}
    types |= {"topk_ids_ptr": "*i32", "num_ids": "i32", "num_experts": "i32", "factor": "fp32"}
    types |= {"z_ptr": "*bf16", "y_ptr": "*bf16", "counters_ptr": "*i32", "stride_ym": "i32"}
    sizes = {"TOPK": 8, "K": K, "BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_T": 16, "SLICE": slice}
    sizes |= {"TILES": tiles, "STAGES": stages, "BUFFERS": 3, "expert_map_ptr": None}
    found = compile_hopper(_moe_down_hopper_kernel, types, sizes, num_warps=4)
    check_fits(found, 90)
    check_not_contracted(found)
    assert found.int8_mma > 0
    assert found.async_copies > 0
    assert found.registers <= 128
