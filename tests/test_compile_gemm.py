"""Every default GEMM configuration, compiled for its cards: tensor cores, shared memory, spills, contraction, loop."""

from typing import Any

import pytest
import triton.language as tl
from compile_for import ARCHS, SHARED_MEMORY, check_fits, check_not_contracted, compile_for, facts, needs_compiler

from moe_int8.kernels.gemm import _int8_scaled_mm_kernel
from moe_int8.kernels.moe_align import BLOCK_TABLE, CHUNK, Alignment, _place_kernel, _quantize_and_count_kernel
from moe_int8.kernels.moe_combine import BLOCK_H, _moe_combine_kernel
from moe_int8.kernels.moe_few_tokens import _down_by_token_kernel, _gate_up_by_slot_kernel
from moe_int8.kernels.moe_gemm import _moe_down_kernel, _moe_gate_up_kernel
from moe_int8.numerics import ACCUMULATORS
from moe_int8.tuning import (
    FEW_SLOTS,
    GATE_UP_B_TILES,
    FewTokensConfig,
    LaunchConfig,
    default_config,
    default_few_tokens,
    fit,
)

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
        {
            "q_ptr": "*i8",
            "scale_ptr": "*fp32",
            "w13_ptr": "*i8",
            "w13_scale_ptr": "*fp32",
            "h_ptr": "*i8",
            "h_scale_ptr": "*fp32",
        }
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
NOT_MULTIPLES_OF_16 = {"M", "max_blocks", "num_slots", "topk", "num_ids", "num_experts", "factor"}
ROUTING = {"topk_ids_ptr": "*i32", "num_ids": "i32", "num_experts": "i32", "num_slots": "i32", "N": "i32", "K": "i32"}
GATE_UP_BY_SLOT = ROUTING | {"x_ptr": "*bf16", "w13_ptr": "*i8", "sums_ptr": "*i32", "scale_ptr": "*fp32"}
GATE_UP_BY_SLOT |= {"topk": "i32", "stride_xm": "i32", "stride_we": "i32", "stride_wn": "i32"}
DOWN = ROUTING | {"scale_ptr": "*fp32", "w2_ptr": "*i8", "w2_scale_ptr": "*fp32", "topk_weights_ptr": "*fp32"}
DOWN |= {"y_ptr": "*bf16", "factor": "fp32", "stride_we": "i32", "stride_wn": "i32", "stride_ym": "i32"}
DOWN_BY_TOKEN = DOWN | {"sums_ptr": "*i32", "w13_scale_ptr": "*fp32"}


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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("N", [128, 256])
def test_kernels_for_few_tokens_compile_well(N: int, arch: int) -> None:
    for config in {default_few_tokens(slots, N) for slots in range(1, FEW_SLOTS + 1)}:
        for kernel, types, constants in few_token_launches(config, N):
            constants["OVERLAP"] = arch >= 90
            found = facts(compile_kernel(kernel, arch, types, constants, config.num_warps, config.num_stages))
            check_fits(found, arch)
            check_not_contracted(found)
            assert found.int8_mma > 0
            assert found.async_copies > 0
            assert found.loop_byte_shuffles <= 32
            if kernel is _gate_up_by_slot_kernel:
                assert found.loop_int_to_float == 0


def few_token_launches(config: FewTokensConfig, N: int) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    up = {
        "BLOCK_ROW": 8192,
        "BLOCK_N": config.up_block_n,
        "BLOCK_K": config.up_block_k,
        "SPLIT_K": config.split_k(7168),
    }
    down = {"TOPK": 8, "SPLITS": config.splits, "BLOCK_N": config.down_block_n, "BLOCK_K": N, "DTYPE": tl.bfloat16}
    return [
        (_gate_up_by_slot_kernel, GATE_UP_BY_SLOT, up | {"x_scale_ptr": None, "expert_map_ptr": None}),
        (_down_by_token_kernel, DOWN_BY_TOKEN, down | {"STAGES": config.num_stages, "expert_map_ptr": None}),
    ]


def compile_kernel(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], num_warps: int, num_stages: int = 3
) -> Any:
    multiples = [argument for argument in types if argument not in NOT_MULTIPLES_OF_16]
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    return compile_for(kernel, arch, types, constants, multiples, **options)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("expert_map", [{"expert_map_ptr": "*i32"}, {}], ids=["map", "no map"])
@pytest.mark.parametrize("id_type", ["*i32", "*i64"])
def test_align_and_combine_compile_well(expert_map: dict[str, str], id_type: str, arch: int) -> None:
    ids = {"topk_ids_ptr": id_type, "num_ids": "i32", "num_experts": "i32"} | expert_map
    count = ids | {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "K": "i32", "stride_xm": "i32"}
    chunks = {"counts_ptr": "*i32", "num_slots": "i32", "num_chunks": "i32"}
    place = ids | chunks | {f"{name}_ptr": "*i32" for name in Alignment._fields}
    combine = ids | {"experts_out_ptr": "*bf16", "y_ptr": "*bf16", "H": "i32", "factor": "fp32", "stride_ym": "i32"}
    constants: dict[str, Any] = {"OVERLAP": arch >= 90} | ({} if expert_map else {"expert_map_ptr": None})
    sizes = {"CHUNK": CHUNK, "EXPERTS": 256}
    for kernel, types, own in (
        (_quantize_and_count_kernel, count | chunks, sizes | {"BLOCK_K": 8192}),
        (_place_kernel, place, sizes | {"BLOCK_M": 128, "BLOCK_CHUNKS": BLOCK_TABLE // 256}),
        (_moe_combine_kernel, combine, {"TOPK": 8, "BLOCK": BLOCK_H}),
    ):
        found = facts(compile_for(kernel, arch, types, constants | own, num_warps=8, enable_fp_fusion=False))
        check_fits(found, arch)
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
    if name != "dense":
        constants["OVERLAP"] = arch >= 90
    if name == "gate_up":
        constants["DTYPE"] = tl.bfloat16
    return compile_kernel(kernel, arch, types, constants, config.num_warps, config.num_stages)
