"""Launch configurations of the GEMMs: tuned ones from JSON files, else one heuristic.

A lookup depends on shapes, the device's name and its compute capability alone, so every rank of a group finds the
same. It never changes a result: with int32 sums are exact, and with fp32 the order of additions is fixed.

Files are named and shaped as vLLM's: `config_file_name(...)` -> {"<M>": {"BLOCK_SIZE_M": 64, ...}, ...}, where M is
the number of tokens and the nearest key, by number, is taken. One entry serves both GEMMs of the fused MoE.
They are read from the folder in MOE_INT8_CONFIG_DIR, then from the ones that ship with the package.
"""

import json
import os
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch

from moe_int8.numerics import FP32_ACCUMULATE_EVERY

CONFIG_DIR_VARIABLE = "MOE_INT8_CONFIG_DIR"
PACKAGED_CONFIGS = Path(__file__).parent / "configs"
UNKNOWN_DEVICE = ("cpu", (8, 0))  # Triton's interpreter: any tile runs

KIB = 1024
# Most shared memory that one block may ask for, by compute capability; others are taken to have the least of these.
SHARED_MEMORY = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 7): 163 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}


@dataclass(frozen=True)
class LaunchConfig:
    """How one GEMM is cut into programs."""

    block_m: int  # rows of a tile
    block_n: int  # columns of a tile; of gate and of up each in the first GEMM of the MoE
    block_k: int  # K of one iteration, which is two dots of block_k / 2
    group_m: int  # row blocks that walk the columns together
    num_warps: int
    num_stages: int

    def shared_memory(self, capability: tuple[int, int], b_tiles: int = 1) -> int:
        """Bytes that the pipelined operands take; the tile in use stays in shared memory from compute capability 9."""
        buffers = max(self.num_stages - (capability < (9, 0)), 1)
        return buffers * (self.block_m + b_tiles * self.block_n) * self.block_k


@dataclass(frozen=True)
class FewTokensConfig:
    """How the two GEMMs for a few tokens are cut into programs."""

    up_block_n: int
    up_block_k: int
    splits: int  # of K in the first GEMM
    down_block_n: int
    num_warps: int
    num_stages: int
    at_once: bool = False
    overlap: bool = False
    down_warps: int = 4

    def split_k(self, K: int) -> int:
        """The part of K that one program of the first GEMM multiplies."""
        return -(-K // (self.splits * self.up_block_k)) * self.up_block_k


@dataclass(frozen=True)
class TwoGemmsConfig:
    """How the two GEMMs over blocks of rows are cut into programs; both have the same block_m."""

    gate_up: LaunchConfig
    down: LaunchConfig


FIELD_NAMES = {  # in the files -> here
    "BLOCK_SIZE_M": "block_m",
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
FEW_TOKENS_TOPK = 16  # most experts a token for which there is a FewTokensConfig
FEW_TOKENS_N = 256  # largest intermediate size of which one program holds all of a token's rows
FEW_SLOTS = 128
GATE_UP_B_TILES = 2  # the first GEMM of the MoE loads a gate and an up tile


def dense_config(M: int, N: int, K: int, device: torch.device, accumulator: str) -> LaunchConfig:
    """The configuration of int8_scaled_mm for [M, K] @ [N, K].T."""
    name, capability = _device(device)
    config = _tuned(config_file_name(name, N=N, K=K), M)
    if config is None:
        config = default_config(M, 1, accumulator)
    return _usable(config, 1, capability, accumulator)


def moe_plan(
    M: int, topk: int, E: int, N: int, device: torch.device, accumulator: str
) -> FewTokensConfig | TwoGemmsConfig:
    """Which kernels run a fused MoE, and how.

    Args:
        M: tokens in the call.
        E: experts over which the M * topk slots spread.
        N: the intermediate size on this rank.
    """
    name, capability = _device(device)
    slots = M * topk
    exact = accumulator == "int32"  # sums may be split and their parts added in any order
    if exact and slots <= FEW_SLOTS and topk <= FEW_TOKENS_TOPK and N <= FEW_TOKENS_N:
        return default_few_tokens(slots, N)
    tuned = _tuned(config_file_name(name, E=E, N=N), M)
    rows = -(-slots // E)  # of one expert, on average
    gate_up, down = (
        _usable(tuned or default_config(rows, b_tiles, accumulator), b_tiles, capability, accumulator)
        for b_tiles in (GATE_UP_B_TILES, 1)
    )
    return TwoGemmsConfig(gate_up, down)


def config_file_name(device_name: str, **sizes: int) -> str:
    """The file for these sizes, in this order: E and N (intermediate size on a rank) for the MoE, N and K for dense.

    Tuner and lookup both call this, so what the one writes the other finds.
    """
    named = ",".join(f"{name}={size}" for name, size in sizes.items())
    return f"{named},device_name={device_name.replace(' ', '_')},dtype=int8_w8a8.json"


def load_configs(path: Path) -> dict[int, LaunchConfig]:
    """Read one file of tuned configurations.

    Raises:
        ValueError: an entry lacks a field or holds what no kernel can run, named with its file.
    """
    try:
        return {int(m): _parse(entry) for m, entry in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of launch configurations: {error!r}") from error


def save_configs(path: Path, configs: dict[int, LaunchConfig]) -> None:
    """Write what `load_configs` reads."""
    entries = {
        str(m): {file_name: getattr(config, name) for file_name, name in FIELD_NAMES.items()}
        for m, config in sorted(configs.items())
    }
    path.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def nearest(configs: dict[int, LaunchConfig], M: int) -> LaunchConfig:
    """The configuration tuned for the number of tokens nearest to M; of two equally near ones the smaller."""
    return configs[min(configs, key=lambda m: (abs(m - M), m))]


def default_config(rows: int, b_tiles: int, accumulator: str) -> LaunchConfig:
    """The heuristic: tiles as tall as the rows that share a weight, 128 of K an iteration.

    Every choice fits 99 KiB, the least shared memory of the cards we know, and none spills registers; fp32
    accumulation keeps a second set of sums, so its tiles stay at 64 rows.

    Args:
        rows: rows that one weight matrix multiplies: M for a dense GEMM, the mean of an expert for the MoE.
        b_tiles: weight tiles of block_n columns that a program loads.
    """
    if rows <= 16:
        return LaunchConfig(16, 64, 128, group_m=1, num_warps=4, num_stages=4)
    if rows <= 32:
        return LaunchConfig(32, 64, 128, group_m=1, num_warps=4, num_stages=4)
    block_n = 128 // b_tiles
    if rows <= 128 or accumulator == "fp32":
        return LaunchConfig(64, block_n, 128, group_m=8, num_warps=4, num_stages=3)
    return LaunchConfig(128, block_n, 128, group_m=8, num_warps=8, num_stages=3)


def default_few_tokens(slots: int, N: int) -> FewTokensConfig:
    """The heuristic for a few tokens: about 256 programs in the first GEMM."""
    block_n, splits = 64, 8
    while splits > 1 and splits * slots * -(-2 * N // block_n) > 256:
        splits //= 2
    return FewTokensConfig(block_n, 128, splits, down_block_n=64, num_warps=4, num_stages=4)


def fit(config: LaunchConfig, b_tiles: int, capability: tuple[int, int]) -> LaunchConfig:
    """`config` with as many stages as the card's shared memory holds.

    Raises:
        ValueError: one stage is already too many.
    """
    limit = SHARED_MEMORY.get(capability, min(SHARED_MEMORY.values()))
    for num_stages in range(config.num_stages, 0, -1):
        fitting = replace(config, num_stages=num_stages)
        if fitting.shared_memory(capability, b_tiles) <= limit:
            return fitting
    raise ValueError(f"{config} needs more shared memory than the {limit} bytes of compute capability {capability}")


def _usable(config: LaunchConfig, b_tiles: int, capability: tuple[int, int], accumulator: str) -> LaunchConfig:
    if accumulator == "fp32":
        config = replace(config, block_k=FP32_ACCUMULATE_EVERY)  # an iteration converts once
    return fit(config, b_tiles, capability)


def _device(device: torch.device) -> tuple[str, tuple[int, int]]:
    if device.type != "cuda":
        return UNKNOWN_DEVICE
    return _cuda_device(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _cuda_device(index: int) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)


def _tuned(file_name: str, M: int) -> LaunchConfig | None:
    configs = _find(file_name, os.environ.get(CONFIG_DIR_VARIABLE))
    return nearest(configs, M) if configs else None


@cache
def _find(file_name: str, extra_folder: str | None) -> dict[int, LaunchConfig]:
    folders = [Path(extra_folder)] if extra_folder else []
    for folder in [*folders, PACKAGED_CONFIGS]:
        if (folder / file_name).is_file():
            return load_configs(folder / file_name)
    return {}


def _parse(entry: dict[str, int]) -> LaunchConfig:
    config = LaunchConfig(**{name: entry[file_name] for file_name, name in FIELD_NAMES.items()})
    for field in fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
    for name, least in (("block_m", 16), ("block_n", 16), ("block_k", 64), ("num_warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            raise ValueError(f"{name} must be a power of two from {least}, got {value}")
    return config
