"""The demo checkpoint: the official layout, and numbers on which a comparison of INT8 and BF16 means something."""

import json
import math
from pathlib import Path

import pytest
import torch
from ranks import load_script
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.text import encode_chat, load_tokenizer
from moe_int8.quantization.block_fp8 import dequantize_block_fp8

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_demo_checkpoint.py"
script = load_script("make_demo_checkpoint")

FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
MTP = 4  # the layer after the last


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "fp8"
    script.main(["--output", str(output)])
    return output


@pytest.fixture(scope="module")
def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.fixture(scope="module")
def dequantized(tensors) -> dict[str, torch.Tensor]:
    scales = {name.removesuffix("_scale_inv"): x for name, x in tensors.items() if name.endswith("_scale_inv")}
    weights = {name: x for name, x in tensors.items() if not name.endswith("_scale_inv")}
    return {name: dequantize_block_fp8(x, scales[name]) if name in scales else x.float() for name, x in weights.items()}


def test_second_call_finds_it_complete_and_touches_nothing(folder, capsys):
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    script.main(["--output", str(folder)])
    assert "complete already" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["fp8"]  # no temporary folder is left


def test_size_is_below_150_mb(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 150e6


def test_index_names_every_tensor_and_its_shard(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), file.name)
    assert index["weight_map"] == weight_map
    assert len(set(weight_map.values())) > 1
    assert set(weight_map.values()) == {f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)}


def test_names_dtypes_and_shapes_are_the_official_ones(tensors):
    attention = {
        "q_a_proj.weight": (FP8, [96, 128]),
        "q_a_proj.weight_scale_inv": (FP32, [1, 1]),
        "q_a_layernorm.weight": (BF16, [96]),
        "q_b_proj.weight": (FP8, [512, 96]),
        "q_b_proj.weight_scale_inv": (FP32, [4, 1]),
        "kv_a_proj_with_mqa.weight": (FP8, [160, 128]),
        "kv_a_proj_with_mqa.weight_scale_inv": (FP32, [2, 1]),  # ragged: 160 = 128 + 32
        "kv_a_layernorm.weight": (BF16, [128]),
        "kv_b_proj.weight": (FP8, [512, 128]),
        "kv_b_proj.weight_scale_inv": (FP32, [4, 1]),
        "o_proj.weight": (FP8, [128, 256]),
        "o_proj.weight_scale_inv": (FP32, [1, 2]),
    }

    def mlp(inter: int) -> dict:
        blocks = inter // 128
        up = {"weight": (FP8, [inter, 128]), "weight_scale_inv": (FP32, [blocks, 1])}
        down = {"weight": (FP8, [128, inter]), "weight_scale_inv": (FP32, [1, blocks])}
        projections = {"gate_proj": up, "up_proj": up, "down_proj": down}
        return {f"{name}.{key}": value for name, both in projections.items() for key, value in both.items()}

    def layer(i: int) -> dict:
        found = {"input_layernorm.weight": (BF16, [128]), "post_attention_layernorm.weight": (BF16, [128])}
        found |= {f"self_attn.{name}": value for name, value in attention.items()}
        if i == 0:
            return found | {f"mlp.{name}": value for name, value in mlp(256).items()}
        found |= {"mlp.gate.weight": (BF16, [16, 128]), "mlp.gate.e_score_correction_bias": (FP32, [16])}
        for module in ["shared_experts", *(f"experts.{e}" for e in range(16))]:
            found |= {f"mlp.{module}.{name}": value for name, value in mlp(128).items()}
        return found

    expected = {"model.embed_tokens.weight": (BF16, [129280, 128]), "lm_head.weight": (BF16, [129280, 128])}
    expected["model.norm.weight"] = (BF16, [128])
    expected |= {f"model.layers.{i}.{name}": value for i in range(MTP + 1) for name, value in layer(i).items()}
    expected |= {
        f"model.layers.{MTP}.{name}": value
        for name, value in {
            "embed_tokens.weight": (BF16, [129280, 128]),
            "enorm.weight": (BF16, [128]),
            "hnorm.weight": (BF16, [128]),
            "eh_proj.weight": (BF16, [128, 256]),
            "shared_head.norm.weight": (BF16, [128]),
            "shared_head.head.weight": (BF16, [129280, 128]),
        }.items()
    }
    assert {name: (x.dtype, list(x.shape)) for name, x in tensors.items()} == expected


def test_mtp_layer_holds_copies_of_embedding_and_head(tensors):
    assert torch.equal(tensors[f"model.layers.{MTP}.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[f"model.layers.{MTP}.shared_head.head.weight"], tensors["lm_head.weight"])


def test_config_is_in_the_official_spelling_and_ours_reads_it(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config["rope_scaling"]["type"] == "yarn"
    assert "rope_parameters" not in config
    read = DeepseekConfig.from_folder(folder)
    assert (read.num_hidden_layers, read.num_nextn_predict_layers, read.latent_dim) == (4, 1, 160)
    assert (read.n_routed_experts, read.n_group, read.topk_group, read.num_experts_per_tok) == (16, 4, 2, 4)
    assert read.rope.factor == 40


def test_tokenizer_has_a_chat_template_with_deepseeks_tokens(folder):
    tokenizer = load_tokenizer(folder)
    system, user, assistant = (
        {"role": role, "content": text}
        for role, text in [("system", "Be brief."), ("user", "hi"), ("assistant", "<think>x</think>yes")]
    )
    ids = encode_chat(tokenizer, [system, user, assistant, user])
    assert tokenizer.decode(ids) == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>hi<｜Assistant｜>yes<｜end▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"
    )
    assert ids.count(tokenizer.bos_token_id) == 1
    with pytest.raises(ValueError, match="unknown role: tool"):
        encode_chat(tokenizer, [{"role": "tool", "content": "x"}])


def test_rows_of_a_weight_differ_by_up_to_50_times(dequantized):
    for name, w in dequantized.items():
        if name.endswith("_proj.weight") or name.endswith("_with_mqa.weight"):
            rms = w.square().mean(dim=1).sqrt()
            assert 10 < rms.max() / rms.median() < 100 or 10 < rms.median() / rms.min() < 100, name


def test_model_is_not_degenerate(folder, dequantized):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["torch_dtype"]
    weights = {name: x for name, x in dequantized.items() if f".layers.{MTP}." not in name}
    model = DeepseekV3ForCausalLM.from_pretrained(
        None, config=DeepseekV3Config(**config), state_dict=weights, dtype=torch.float32
    ).eval()
    model.set_attn_implementation("eager")  # the one that returns its probabilities
    picks: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args, name=name: picks.update({name: args[1]}))
    ids = torch.randint(128000, (1, 64))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, output_attentions=True)

    logits = output.logits[0]
    assert logits.isfinite().all()
    assert 2 < logits.std() < 4
    assert logits.argmax(-1).unique().numel() > 56  # tokens do not all continue alike

    # Channels differ in size by construction: measured in units of the embedding's, no token's state grows or vanishes.
    unit = dequantized["model.embed_tokens.weight"].std(dim=0)
    for hidden in output.hidden_states[:-1]:
        size = (hidden[0] / unit).std(dim=-1)
        assert size.min() > 0.5
        assert size.max() < 2.5

    for attention in output.attentions:  # [1, heads, 64, 64]: a query looks at some tokens, not at all alike or at one
        assert 2 < 1 / attention[0, :, -1].square().sum(-1).mean() < 32

    assert len(picks) == 3
    for experts in picks.values():
        assert experts.shape == (64, 4)
        assert experts.unique().numel() >= 8
        assert experts.sort(dim=-1).values.unique(dim=0).shape[0] > 16  # and in many combinations


@pytest.fixture
def tiny_vocabulary(monkeypatch):
    """A vocabulary of 256: these tests look at files, not at numbers."""
    monkeypatch.setitem(script.CONFIG, "vocab_size", 256)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.usefixtures("tiny_vocabulary")
def test_seed_decides_every_byte_and_force_replaces(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    script.main(["--output", str(first), "--seed", "3"])
    script.main(["--output", str(second), "--seed", "4"])
    shard = "model-00001-of-00001.safetensors"
    assert content(first)[shard] != content(second)[shard]
    with pytest.raises(SystemExit):
        script.main(["--output", str(second), "--seed", "3"])
    assert "was built with --seed 4; add --force" in capsys.readouterr().err
    script.main(["--output", str(second), "--seed", "3", "--force"])
    assert content(first) == content(second)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.usefixtures("tiny_vocabulary")
def test_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(script.shutil, "copyfile", interrupted)  # after the shards, the index and the config
        with pytest.raises(SystemExit):
            script.main(["--output", str(tmp_path / "demo")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("tiny_vocabulary")
def test_a_missing_file_is_noticed_and_built_again(tmp_path):
    output = tmp_path / "demo"
    script.main(["--output", str(output)])
    whole = content(output)
    (output / "model-00001-of-00001.safetensors").unlink()
    script.main(["--output", str(output)])
    assert content(output) == whole


def test_a_folder_with_other_files_is_refused_even_with_force(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path), "--force"])
    assert "exists and is no demo checkpoint" in capsys.readouterr().err
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_norms_undo_the_channel_sizes(dequantized):
    embedding = dequantized["model.embed_tokens.weight"][:4096]
    normed = embedding / embedding.square().mean(-1, keepdim=True).sqrt() * dequantized["model.norm.weight"]
    channel = normed.square().mean(0).sqrt()
    assert channel.min() > 0.5  # jitter of 10 % and the norm's own spread
    assert channel.max() < 1.6
    assert math.isclose(channel.mean(), 1.0, rel_tol=0.1)
