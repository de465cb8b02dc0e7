"""Files and config.json must describe the same model; finding out takes no longer than the files are."""

import json
import time
from pathlib import Path

import pytest
import torch
from fuzzing import refused
from official_layout import TINY, TINY_V2_LITE, shapes, write_official_checkpoint
from safetensors.torch import load_file, save_file

from moe_int8.models.deepseek.checkpoint import Checkpoint, CheckpointError
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.layout import check_fits, tensor_shapes
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.published import R1
from moe_int8.models.deepseek.weights import load_model, open_model, weight_table
from moe_int8.parallel import Groups

CONFIGS = {
    "v3": TINY,
    "v2-lite": TINY_V2_LITE,
    "no shared experts": TINY | {"n_shared_experts": 0},
    "two shared experts": TINY | {"n_shared_experts": 2},
    "dense": TINY | {"first_k_dense_replace": 2},
    "all experts": TINY | {"first_k_dense_replace": 0},
}


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("official")
    write_official_checkpoint(folder, TINY, fp8=False, shards=1)
    return folder


def changed(folder: Path, result: Path, change=lambda tensors: None, **config: object) -> Path:
    """A copy in one file, its tensors and its config.json changed."""
    result.mkdir()
    tensors = load_file(next(folder.glob("*.safetensors")))
    change(tensors)
    save_file(tensors, result / "model.safetensors")
    (result / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return result


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_the_tensors_are_those_of_the_official_files_and_those_that_the_model_loads(content):
    config = DeepseekConfig.from_dict(content)
    needed = dict(tensor_shapes(config))
    assert needed == shapes(content | {"num_nextn_predict_layers": 0})
    model = DeepseekModel(config, Precision(torch.bfloat16, lambda name: False), Groups(), "meta")
    assert set(needed) == set(weight_table(model))
    elements = sum(torch.Size(shape).numel() for shape in needed.values())
    assert elements == sum(parameter.numel() for parameter in model.parameters())


def test_r1_has_671_billion_parameters():
    names = dict(tensor_shapes(DeepseekConfig.from_dict(R1)))
    assert round(sum(torch.Size(shape).numel() for shape in names.values()) / 1e9, 1) == 671.0
    assert max(map(len, names)) < 64


ABSURD = {
    "num_hidden_layers": (
        10**9,
        "no file holds .* and very many more; the checkpoint is incomplete, or its config.json another",
    ),
    "n_routed_experts": (2**31 - 2, "model.layers.1.mlp.gate.weight: the file holds shape"),
    "hidden_size": (2**31 - 1, r"embed_tokens.weight: the file holds shape \[64, 160\].* needs \[64, 2147483647\]"),
    "intermediate_size": (10**9, "layers.0.mlp.gate_proj.weight: the file holds shape"),
    "moe_intermediate_size": (10**9, "layers.1.mlp.experts.0.gate_proj.weight: the file holds shape"),
    "n_shared_experts": (10**9, "layers.1.mlp.shared_experts.gate_proj.weight: the file holds shape"),
    "num_attention_heads": (10**9, "layers.0.self_attn.q_b_proj.weight: the file holds shape"),
    "q_lora_rank": (10**9, "layers.0.self_attn.q_a_proj.weight: the file holds shape"),
    "kv_lora_rank": (10**9, "layers.0.self_attn.kv_a_proj_with_mqa.weight: the file holds shape"),
    "qk_nope_head_dim": (10**9, "layers.0.self_attn.q_b_proj.weight: the file holds shape"),
    "qk_rope_head_dim": (10**9, "layers.0.self_attn.q_b_proj.weight: the file holds shape"),
    "v_head_dim": (10**9, "layers.0.self_attn.kv_b_proj.weight: the file holds shape"),
    "vocab_size": (2**31 - 1, "embed_tokens.weight: the file holds shape"),
}


@pytest.mark.parametrize("field", ABSURD)
def test_absurd_sizes_are_refused_at_once_and_before_memory_is_taken(official, tmp_path, field):
    value, message = ABSURD[field]
    folder = changed(official, tmp_path / "absurd", **{field: value})
    start = time.monotonic()
    assert refused(lambda: open_model(folder))  # asserts that less than 128 MB were taken
    assert time.monotonic() - start < 5  # takes 0.3 s at most
    with pytest.raises(CheckpointError, match=message):
        open_model(folder)


def test_sizes_that_need_no_tensor_may_be_large(official, tmp_path):
    """Any number of multi-token-prediction layers, dense layers beyond the last, tokens of context."""
    huge = {"num_nextn_predict_layers": 2**31 - 1, "max_position_embeddings": 2**31 - 1}
    lines: list[str] = []
    model = load_model(changed(official, tmp_path / "huge", **huge), say=lines.append)
    assert len(model.layers) == 2
    assert len(lines) == 1
    assert "skipping layer 2" in lines[0]


def test_another_models_config_is_told_from_these_files(official, tmp_path):
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: the file holds shape \[64, 160\]"):
        open_model(changed(official, tmp_path / "r1", **R1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64, torch.bool])
@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"])
def test_a_weight_in_a_format_that_is_not_run_is_named(official, tmp_path, name, dtype):
    folder = changed(official, tmp_path / "dtype", lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(
        CheckpointError, match=f"model.safetensors: {name} is stored as {dtype}, which is not supported"
    ):
        open_model(folder)


UNQUANTIZED = {
    "model.embed_tokens.weight": ("embedding", 2),
    "lm_head.weight": ("output head", 2),
    "model.norm.weight": ("norm", 1),
    "model.layers.0.self_attn.kv_a_layernorm.weight": ("norm", 1),
    "model.layers.1.mlp.gate.weight": ("router", 2),
    "model.layers.1.mlp.gate.e_score_correction_bias": ("router", 1),
}


@pytest.fixture(scope="module")
def int8(official, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "int8"
    convert(official, folder, Settings())
    return folder


@pytest.mark.parametrize("scaled", [False, True], ids=["no scale", "with a scale"])
@pytest.mark.parametrize("name", UNQUANTIZED)
def test_nothing_but_projections_may_be_int8(int8, tmp_path, name, scaled):
    """Also with a scale of the right shape: dequantised it would run, on a router or norm that INT8 has spoiled."""

    def change(tensors):
        tensors[name] = torch.ones_like(tensors[name], dtype=torch.int8)
        if scaled:
            tensors[f"{name}_scale"] = torch.ones(len(tensors[name]), 1)

    folder = changed(int8, tmp_path / "changed", change, quantization_config=None)
    with pytest.raises(CheckpointError, match=f"model.safetensors: {name} is ") as error:
        open_model(folder)
    if scaled and UNQUANTIZED[name][1] == 2:
        assert "is stored as torch.int8, which is not supported: get it in bfloat16 or float32" in str(error.value)


def test_an_fp8_checkpoint_fits_with_its_scales(tmp_path):
    write_official_checkpoint(tmp_path, TINY)
    checkpoint = Checkpoint(tmp_path)
    count = sum(name.startswith("model.layers.2.") for name in checkpoint.names())
    assert check_fits(checkpoint, DeepseekConfig.from_folder(tmp_path)) == count


@pytest.mark.parametrize("name", ["model.layers.4.x", "model.layers.-1.x", "model.layers.x", "layers.2.x", "x"])
def test_only_layers_right_behind_the_model_are_for_multi_token_prediction(official, tmp_path, name):
    folder = changed(official, tmp_path / "more", lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(CheckpointError, match=f"the files hold {name}, which this model does not have"):
        open_model(folder)
