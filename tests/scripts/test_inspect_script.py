"""inspect_checkpoint.py before a download: config.json and the index are all there is."""

import json
import re
import time
from math import prod
from pathlib import Path

import pytest
from official_layout import shapes
from ranks import load_script

from moe_int8.models.deepseek.checkpoint import CONFIG, INDEX
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.published import R1

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
SHARDS = 163
REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")  # their outputs are shared by all heads
ROW_PARALLEL = ("o_proj", "down_proj")


def described(folder: Path, suffix: str, **config: object) -> Path:
    """R1 without its shards; `suffix` continues the names of its quantised weights."""
    names = [name + end for name in shapes(R1) for end in ["", suffix][: 2 if suffix and projection_kind(name) else 1]]
    weight_map = {
        name: f"model-{i * SHARDS // len(names) + 1:05d}-of-{SHARDS:06d}.safetensors" for i, name in enumerate(names)
    }
    (folder / CONFIG).write_text(json.dumps(R1 | config))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def rank_bytes(name: str, shape: tuple[int, ...], tp: int, int8: bool) -> int:
    """What a tensor of the files takes on one of `tp` ranks, written down from what is split how in the model."""
    if ".mlp.gate." in name:
        return 4 * prod(shape)  # the router is fp32 and whole on every rank
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return 2 * -(-shape[0] // tp) * shape[1]
    kind = (projection_kind(name) or "norm").split(".")[-1]
    if kind == "norm":
        return 2 * prod(shape)
    N, K = shape
    if kind in ROW_PARALLEL:
        K //= tp
    elif kind not in REPLICATED:
        N //= tp
    return N * (K + 4) if int8 and kind != "kv_b_proj" else 2 * N * K  # kv_b is dequantised while loading


def run(folder: Path, *argv: object) -> None:
    load_script("inspect_checkpoint").main([str(folder), *map(str, argv)])


@pytest.mark.parametrize(
    "suffix, config, form",
    [
        ("_scale_inv", {"quantization_config": FP8}, "fp8"),
        ("_scale", {"quantization_config": {"quant_method": "w8a8_int8"}}, "int8"),
        ("_scale", {}, "int8"),  # as the first published INT8 files of R1 were
        ("", {}, "bf16"),
    ],
    ids=["official", "int8", "int8 without a word in config.json", "bf16"],
)
def test_the_memory_of_r1_on_each_rank_is_known_from_config_and_index(tmp_path, capsys, suffix, config, form):
    folder = described(tmp_path, suffix, **config)
    start = time.process_time()
    run(folder, "--json", tmp_path / "facts.json")
    assert time.process_time() - start < 5  # takes 1 s; no shard is there to be read
    facts = json.loads((tmp_path / "facts.json").read_text())
    out = capsys.readouterr().out
    assert (facts["format"], facts["files"], facts["bytes"]) == (form, SHARDS, None)
    assert facts["tensors"] == len(json.loads((folder / INDEX).read_text())["weight_map"])
    used = {name: shape for name, shape in shapes(R1).items() if not name.startswith("model.layers.61.")}
    for tp in (1, 2, 4, 8, 16, 32):
        total = {
            name: sum(rank_bytes(tensor, shape, tp, name == "INT8") for tensor, shape in used.items())
            for name in ("INT8", "BF16")
        }
        assert {name: facts["weight_bytes_per_rank"][name][str(tp)] for name in total} == total
        assert f"  {tp:2d} {total['INT8'] / 1e9:10.3f}{total['BF16'] / 1e9:10.3f}\n" in out
    assert f"{form.upper()}, {facts['tensors']} tensors in 163 files (none is here)" in out
    assert "next: download the files, then " in out


def test_c80_before_the_download_an_fp8_checkpoint_is_named_as_one_to_convert(tmp_path, capsys):
    run(described(tmp_path, "_scale_inv", quantization_config=FP8))
    out = capsys.readouterr().out
    assert "FP8 weights do not run" in out
    assert out.endswith(f"next: download the files, then python scripts/convert.py {tmp_path} {tmp_path}-INT8\n")


@pytest.mark.parametrize(
    "suffix, config, message",
    [
        (
            "_scale",
            {"quantization_config": FP8},
            "config.json says FP8, but the names of the tensors are those of INT8",
        ),
        ("_scale", {"num_hidden_layers": 10**9}, "very many more; the checkpoint is incomplete, or its config.json"),
        (
            "_scale",
            {"n_routed_experts": 2**31 - 8},
            r"model.layers.3.mlp.gate.weight would have \d+ elements, no model's: refused",
        ),
        (
            "_scale",
            {"hidden_size": 2**31 - 1},
            r"model.embed_tokens.weight would have \d+ elements, no model's: refused",
        ),
        ("_scale", {"q_lora_rank": None}, "no file holds model.layers.0.self_attn.q_proj.weight"),
        ("_zero_point", {}, "the files hold model.layers.0.mlp.down_proj.weight_zero_point, "),
    ],
    ids=["two formats", "layers", "experts", "hidden", "another model", "unknown tensors"],
)
def test_a_config_and_an_index_that_differ_are_refused_at_once(tmp_path, capsys, suffix, config, message):
    start = time.process_time()
    with pytest.raises(SystemExit):
        run(described(tmp_path, suffix, **config))
    assert time.process_time() - start < 5  # whatever sizes config.json claims
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_download_that_has_begun_is_incomplete(tmp_path, capsys):
    folder = described(tmp_path, "_scale_inv", quantization_config=FP8)
    (folder / "model-00007-of-000163.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit):
        run(folder)
    assert f"{folder}/model-00001-of-000163.safetensors is missing, though {INDEX} names it" in capsys.readouterr().err
