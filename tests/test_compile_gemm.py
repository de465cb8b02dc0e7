"""Every default GEMM configuration, compiled for its cards: tensor cores, shared memory, spills, contraction, loop."""

from typing import Any

import pytest
from compile_for import ARCHS, SHARED_MEMORY, check_fits, check_not_contracted, compile_for, facts, needs_compiler

from moe_int8.kernels.gemm import _int8_scaled_mm_kernel
from moe_int8.kernels.moe_align import BLOCK_SLOTS, Alignment, _count_kernel, _scatter_kernel
from moe_int8.kernels.moe_combine import BLOCK_H, _moe_combine_kernel
from moe_int8.kernels.moe_gemm import _moe_down_kernel, _moe_gate_up_kernel
from moe_int8.numerics import ACCUMULATORS
from moe_int8.tuning import GATE_UP_B_TILES, LaunchConfig, default_config, fit

pytestmark = needs_compiler

ROWS = (1, 32, 128, 4096)  # one for each branch of the heuristic
KERNELS = {  # kernel, its arguments, weight tiles of block_n
    "dense": (
        _int8_scaled_mm_kernel,
        {"q_ptr": "*i8", "weight_ptr": "*i8", "scale_ptr": "*fp32", "weight_scale_ptr": "*fp32", "bias_ptr": "*fp32"}
        | {"y_ptr": "*bf16", "M": "i32", "N": "i32", "K": "i32", "stride_qm": "i32", "stride_wn": "i32"},
        1,
    ),
    "gate_up": (
        _moe_gate_up_kernel,
        {"q_ptr": "*i8", "scale_ptr": "*fp32", "w13_ptr": "*i8", "w13_scale_ptr": "*fp32", "h_ptr": "*bf16"}
        | {"sorted_token_ids_ptr": "*i32", "expert_ids_ptr": "*i32", "num_tokens_post_padded_ptr": "*i32"}
        | {"max_blocks": "i32", "num_slots": "i32", "topk": "i32", "N": "i32", "K": "i32"}
        | {"stride_qm": "i32", "stride_we": "i32", "stride_wn": "i32"},
        GATE_UP_B_TILES,
    ),
    "down": (
        _moe_down_kernel,
        {"q_ptr": "*i8", "scale_ptr": "*fp32", "w2_ptr": "*i8", "w2_scale_ptr": "*fp32", "topk_weights_ptr": "*fp32"}
        | {"sorted_token_ids_ptr": "*i32", "expert_ids_ptr": "*i32", "num_tokens_post_padded_ptr": "*i32"}
        | {"y_ptr": "*bf16", "max_blocks": "i32", "num_slots": "i32", "N": "i32", "K": "i32"}
        | {"stride_we": "i32", "stride_wn": "i32"},
        1,
    ),
}
NOT_MULTIPLES_OF_16 = {"M", "max_blocks", "num_slots", "topk"}


def launches() -> list:
    """The distinct (kernel, configuration, accumulator, arch)."""
    found = {}
    for name, (_, _, b_tiles) in KERNELS.items():
        for accumulator in ACCUMULATORS:
            for arch in ARCHS:
                for rows in ROWS:
                    config = fit(default_config(rows, b_tiles, accumulator), b_tiles, divmod(arch, 10))
                    found[name, config, accumulator, arch] = None
    return [
        pytest.param(*launch, id=f"{launch[0]}-{launch[1].block_m}x{launch[1].block_n}-{launch[2]}-sm{launch[3]}")
        for launch in found
    ]


@pytest.mark.parametrize("name, config, accumulator, arch", launches())
def test_default_configuration_compiles_well(name: str, config: LaunchConfig, accumulator: str, arch: int) -> None:
    found = facts(compile_gemm(name, config, accumulator, arch, even_k=True))
    b_tiles = KERNELS[name][2]
    check_fits(found, arch)
    check_not_contracted(found)
    assert found.shared_memory <= config.shared_memory(divmod(arch, 10), b_tiles) <= SHARED_MEMORY[arch]
    assert found.int8_mma > 0
    assert found.loop_int8_mma > 0
    assert found.async_copies > 0
    if arch < 90:  # the K loop keeps its operands as they were loaded (see int8_tile)
        assert found.loop_byte_shuffles <= 32
    if accumulator == "int32":
        assert found.loop_int_to_float == 0
        assert found.loop_fp32_add == 0
    else:
        assert found.loop_int_to_float > 0


@pytest.mark.parametrize("name", KERNELS)
def test_masked_loop_compiles_as_well(name: str) -> None:
    """K that is no multiple of block_k: an intermediate size of 64 on a rank, kv_a's 576 outputs."""
    found = facts(compile_gemm(name, default_config(4096, KERNELS[name][2], "int32"), "int32", 80, even_k=False))
    check_fits(found, 80)
    check_not_contracted(found)
    assert found.loop_int8_mma > 0
    assert found.async_copies > 0
    assert found.loop_byte_shuffles <= 32


@pytest.mark.parametrize("expert_map", [{"expert_map_ptr": "*i32"}, {}], ids=["map", "no map"])
@pytest.mark.parametrize("id_type", ["*i32", "*i64"])
def test_align_and_combine_compile_well(expert_map: dict[str, str], id_type: str) -> None:
    ids = {"topk_ids_ptr": id_type, "num_ids": "i32", "num_experts": "i32"} | expert_map
    count = ids | {"counts_ptr": "*i32", "num_slots": "i32"}
    scatter = count | {f"{name}_ptr": "*i32" for name in Alignment._fields}
    combine = ids | {"experts_out_ptr": "*bf16", "y_ptr": "*bf16", "topk": "i32", "H": "i32", "factor": "fp32"}
    combine |= {"stride_ym": "i32"}
    no_map: dict[str, Any] = {} if expert_map else {"expert_map_ptr": None}
    for kernel, types, constants in (
        (_count_kernel, count, {"BLOCK": BLOCK_SLOTS}),
        (_scatter_kernel, scatter, {"EXPERTS": 256, "BLOCK_M": 128, "BLOCK": BLOCK_SLOTS}),
        (_moe_combine_kernel, combine, {"BLOCK": BLOCK_H}),
    ):
        found = facts(compile_for(kernel, 80, types, no_map | constants, enable_fp_fusion=False))
        check_fits(found, 80)
        check_not_contracted(found)


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_dense_without_bias_compiles(accumulator: str) -> None:
    config = default_config(1, 1, accumulator)
    found = facts(compile_gemm("dense", config, accumulator, 80, even_k=True, bias_ptr=None))
    check_fits(found, 80)
    assert found.loop_int8_mma > 0


def compile_gemm(name: str, config: LaunchConfig, accumulator: str, arch: int, even_k: bool, **pointers: None) -> Any:
    kernel, types, _ = KERNELS[name]
    types = {argument: kind for argument, kind in types.items() if argument not in pointers}
    constants = pointers | {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "EVEN_K": even_k,
        "FP32_ACCUMULATE": accumulator == "fp32",
    }
    return compile_for(
        kernel,
        arch,
        types,
        constants,
        [argument for argument in types if argument not in NOT_MULTIPLES_OF_16],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
