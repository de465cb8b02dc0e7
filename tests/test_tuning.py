"""The lookup of launch configurations: shared memory (C09), file names (C10), nearest number of tokens (C11)."""

import json
from pathlib import Path

import pytest
import torch

from moe_int8 import tuning
from moe_int8.numerics import ACCUMULATORS
from moe_int8.tuning import (
    CONFIG_DIR_VARIABLE,
    SHARED_MEMORY,
    LaunchConfig,
    config_file_name,
    default_config,
    dense_config,
    fit,
    load_configs,
    moe_plan,
    nearest,
    save_configs,
)

CPU = torch.device("cpu")
A100, ADA = (8, 0), (8, 9)
SMALL = LaunchConfig(16, 32, 128, group_m=1, num_warps=4, num_stages=3)
LARGE = LaunchConfig(64, 64, 128, group_m=8, num_warps=8, num_stages=3)


def test_c09_shared_memory_of_a_large_tile():
    config = LaunchConfig(128, 256, 128, group_m=8, num_warps=8, num_stages=4)
    assert config.shared_memory(A100) == 147_456
    assert fit(config, 1, A100) == config
    assert fit(config, 1, ADA).num_stages == 3  # 98,304 of 101,376 bytes


def test_c09_tile_that_never_fits_is_refused_before_launch():
    config = LaunchConfig(128, 256, 256, group_m=8, num_warps=8, num_stages=4)
    assert config.shared_memory(A100) == 294_912
    assert fit(config, 1, A100).num_stages == 2  # 98,304
    with pytest.raises(ValueError, match="more shared memory than the 101376 bytes"):
        fit(LaunchConfig(256, 256, 256, group_m=8, num_warps=8, num_stages=4), 1, ADA)


@pytest.mark.parametrize("capability", [*SHARED_MEMORY, (7, 7)])
def test_c09_defaults_fit_every_card(capability):
    limit = SHARED_MEMORY.get(capability, 99 * 1024)
    for rows in (1, 17, 33, 129, 60_000):
        for b_tiles in (1, 2):
            for accumulator in ACCUMULATORS:
                config = default_config(rows, b_tiles, accumulator)
                assert fit(config, b_tiles, capability) == config  # nothing had to be taken away
                assert config.shared_memory(capability, b_tiles) <= limit


def test_c10_file_name_of_a_tp16_shard():
    name = config_file_name("NVIDIA A100-SXM4-80GB", E=256, N=2048 // 16)
    assert name == "E=256,N=128,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a8.json"


def test_c10_what_a_tuner_writes_is_what_the_lookup_finds(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tuning, "_device", lambda device: ("NVIDIA A100-SXM4-80GB", A100))
    default = moe_plan(80, 8, 256, 128, CPU, "int32").gate_up
    save_configs(tmp_path / config_file_name("NVIDIA A100-SXM4-80GB", E=256, N=128), {8: LARGE})
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(tmp_path))
    assert moe_plan(80, 8, 256, 128, CPU, "int32").gate_up == LARGE != default
    assert moe_plan(80, 8, 256, 64, CPU, "int32").gate_up != LARGE  # another shard, another file


def test_dense_lookup_has_its_own_file(tmp_path: Path, monkeypatch):
    save_configs(tmp_path / config_file_name("cpu", N=576, K=7168), {1: SMALL, 64: LARGE})
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(tmp_path))
    assert dense_config(3, 576, 7168, CPU, "int32") == SMALL
    assert dense_config(200, 576, 7168, CPU, "int32") == LARGE
    assert dense_config(3, 577, 7168, CPU, "int32") == default_config(3, 1, "int32")


@pytest.mark.parametrize("M, key", [(1, 1), (20, 16), (100, 128), (5000, 2048)])
def test_c11_nearest_by_number_not_by_string(tmp_path: Path, M: int, key: int):
    path = tmp_path / "configs.json"
    keys = (1, 16, 128, 2048)
    save_configs(path, {m: LaunchConfig(16, 32, 64, group_m=m, num_warps=4, num_stages=3) for m in keys})
    assert list(json.loads(path.read_text())) == ["1", "16", "128", "2048"]
    assert nearest(load_configs(path), M).group_m == key


def test_c11_of_two_equally_near_the_smaller():
    assert nearest({16: SMALL, 32: LARGE}, 24) == SMALL


def test_saved_configs_load_as_they_were(tmp_path: Path):
    save_configs(tmp_path / "x.json", {64: LARGE, 1: SMALL})
    assert load_configs(tmp_path / "x.json") == {1: SMALL, 64: LARGE}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "JSONDecodeError"),
        ('{"1": {"BLOCK_SIZE_M": 16}}', "BLOCK_SIZE_N"),
        ("[]", "AttributeError"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "E=1,N=1,device_name=x,dtype=int8_w8a8.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"device_name=x.*{message}"):
        load_configs(path)


@pytest.mark.parametrize("field, value", [("block_m", 24), ("block_k", 32), ("num_warps", 3), ("num_stages", 0)])
def test_impossible_tile_is_refused(tmp_path: Path, field: str, value: int):
    path = tmp_path / "x.json"
    save_configs(path, {1: LaunchConfig(**{**vars(SMALL), field: value})})
    with pytest.raises(ValueError, match=f"{field} must be .*got {value}"):
        load_configs(path)


def test_fp32_converts_once_every_128_whatever_the_file_says(tmp_path: Path, monkeypatch):
    wide = LaunchConfig(16, 32, 256, group_m=1, num_warps=4, num_stages=3)
    save_configs(tmp_path / config_file_name("cpu", N=64, K=512), {1: wide})
    monkeypatch.setenv(CONFIG_DIR_VARIABLE, str(tmp_path))
    assert dense_config(1, 64, 512, CPU, "int32").block_k == 256
    assert dense_config(1, 64, 512, CPU, "fp32").block_k == 128


def test_both_moe_gemms_share_the_rows_of_a_block():
    for M in (1, 7, 300, 4096, 60_000):
        plan = moe_plan(M, 8, 256, 2048, CPU, "int32")
        assert plan.gate_up.block_m == plan.down.block_m
