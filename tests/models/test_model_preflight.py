"""What preflight says of a checkpoint on a node."""

import shutil

import pytest
import torch
from official_layout import TINY, write_official_checkpoint

from moe_int8.models.deepseek import memory
from moe_int8.models.deepseek.checkpoint import CheckpointError
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.memory import MemoryPlan
from moe_int8.models.deepseek.preflight import find_model, plan_memory


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "fp8"
    write_official_checkpoint(folder, TINY)
    return folder


@pytest.fixture(scope="module")
def int8(fp8):
    convert(fp8, fp8.parent / "int8", Settings())
    return fp8.parent / "int8"


@pytest.fixture
def copy(int8, tmp_path):
    return shutil.copytree(int8, tmp_path / "copy")


def test_a_checkpoint_that_runs(int8):
    size = sum(file.stat().st_size for file in int8.glob("*.safetensors"))
    count = len(list(int8.glob("*.safetensors")))
    assert str(find_model(int8, 2)) == f"{int8}: INT8, {size / 1e9:.3f} GB in {count} files, TP 2"


def test_an_fp8_checkpoint_gets_the_command_that_converts_it(fp8):
    with pytest.raises(CheckpointError, match=f"python scripts/convert.py {fp8} {fp8}-INT8"):
        find_model(fp8, 2)


def test_ranks_over_which_the_model_does_not_split(int8):
    with pytest.raises(ValueError, match="size 16 does not divide num_attention_heads = 2; use one of 1, 2"):
        find_model(int8, 16)


def test_a_missing_shard_is_named(copy):
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        find_model(copy, 2)


def test_a_copy_is_the_same_checkpoint(int8, copy):
    one, other = find_model(int8, 2).shared(), find_model(copy, 2).shared()
    assert one == other
    assert {"config.json", "model.safetensors.index.json", "generation_config.json"} < set(one.values)


def test_other_settings_are_another_checkpoint(int8, copy):
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    one, other = find_model(int8, 2).shared(), find_model(copy, 2).shared()
    with pytest.raises(ValueError, match=r"generation_config.json is .* on node 0, .* on node 1: copy the checkpoint"):
        one.compare({0: one.values, 1: other.values})


def test_other_weights_of_the_same_sizes_are_another_checkpoint(int8, copy):
    """As V3 and R1 are: the same index, config and sizes."""
    shard = sorted(copy.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    one, other = find_model(int8, 2).shared(), find_model(copy, 2).shared()
    assert {name for name in one.values if one.values[name] != other.values[name]} == {shard.name}


def test_the_fullest_gpu_decides_whether_the_model_fits(int8, monkeypatch):
    free = {0: 10_000_000_000, 1: 1_000, 2: 0}  # GPU 2 gets no rank
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[torch.device("cuda", device).index], 0))
    monkeypatch.setattr(
        MemoryPlan, "of", classmethod(lambda cls, *_, device, **__: cls(2_000, 0, 1, free[device.index]))
    )
    with pytest.raises(ValueError, match=r"on cuda:1: out of memory. .*left -0.000 of 0.000 GB. Lower"):
        plan_memory(find_model(int8, 2), "cuda", 2)
    assert plan_memory(find_model(int8, 2), "cuda", 1).free == free[0]


def test_the_ranks_of_a_cpu_share_its_memory(int8, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    whole, half = (plan_memory(find_model(int8, tp), "cpu", tp) for tp in (1, 2))
    assert (whole.free, half.free) == (10_000_000, 5_000_000)
    assert whole.weights / 2 < half.weights < whole.weights  # norms, latents and the router are not split
