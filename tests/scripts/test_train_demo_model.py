"""Training the demo model: it learns, its experts are balanced, and its files are a checkpoint that we load."""

import json
import random
from pathlib import Path

import pytest
import torch
from ranks import ROOT, load_script
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from moe_int8.evals.demo.checkpoint import write_checkpoint
from moe_int8.evals.demo.corpus import Corpus, write_held_out
from moe_int8.evals.demo.model import DEMO, TINY, WideExperts, build_model, moe_layers
from moe_int8.evals.demo.tokenizer import build_tokenizer
from moe_int8.evals.demo.training import BIAS_STEP, LETTER_WEIGHT, Balance, Plan, token_weights
from moe_int8.evals.demo.word_problems import Difficulty
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.text import encode_chat, load_tokenizer
from moe_int8.models.deepseek.weights import load_model, open_model
from moe_int8.parallel import check_tp_size

CPU = torch.device("cpu")
UPDATES = 85
COMMAND = f"--device cpu --size tiny --updates {UPDATES} --batch-tokens 512 --workers 0 --held-out 30 --check 8".split()


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")  # scripts import each other
        yield load_script("train_demo_model")


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    script.main(["--output", str(root / "demo"), "--json", str(root / "train.json"), *COMMAND])
    return root


def test_report_holds_losses_usage_and_accuracy(trained):
    content = json.loads((trained / "train.json").read_text())
    (row,) = content["rows"]
    assert row["updates"] == UPDATES
    assert row["tokens"] == UPDATES * 512
    assert [update for update, _ in row["losses"]] == [20, 40, 60, 80, 85]
    losses = [loss for _, loss in row["losses"]]
    # A guess among 640 tokens costs 6.46. Three seeds came from 6.1 to 4.1.
    assert losses[0] > 5.5
    assert losses[3] < losses[0] - 1.0
    assert losses[:4] == sorted(losses[:4], reverse=True)
    assert [sum(shares) for shares in row["usage"]] == [pytest.approx(1)]
    assert [len(shares) for shares in row["usage"]] == [8]
    assert [(each["set"], each["shots"]) for each in row["accuracy"]] == [
        ("gsm8k", 0),
        ("mmlu", 0),
        ("gsm8k", 5),
        ("mmlu", 5),
    ]
    for each in row["accuracy"]:
        assert sum(part["n"] for part in each["parts"]) == each["n"] >= 7
        assert each["score"] * each["n"] == pytest.approx(sum(part["score"] * part["n"] for part in each["parts"]))
    assert content["device"] == row["device"] == "cpu"


def test_card_says_what_was_measured(trained):
    text = (trained / "demo" / "README.md").read_text()
    (row,) = json.loads((trained / "train.json").read_text())["rows"]
    for each, name in zip(row["accuracy"], ["word problems", "four-choice questions"] * 2):
        assert f"| {name} | {each['shots']} | {each['score']:.1%} | {each['stderr']:.1%} | {each['n']} |" in text
    assert f"{row['parameters'] / 1e6:.1f} million parameters" in text
    assert "3 to 8 calculations" in text
    assert "{" not in text


def test_checkpoint_has_the_official_layout(trained):
    folder = trained / "demo"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    tensors = load_file(folder / "model-00001-of-00001.safetensors")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    moe = "model.layers.1.mlp."
    expected = {f"{moe}gate.weight": [8, 64], f"{moe}gate.e_score_correction_bias": [8]}
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(8))):
        expected |= {f"{moe}{expert}.{name}_proj.weight": [32, 64] for name in ("gate", "up")}
        expected[f"{moe}{expert}.down_proj.weight"] = [64, 32]
    assert {name: list(x.shape) for name, x in tensors.items() if name.startswith(moe)} == expected
    fp32 = {name for name, x in tensors.items() if x.dtype != torch.bfloat16}
    assert fp32 == {f"{moe}gate.e_score_correction_bias"}
    assert tensors[f"{moe}gate.e_score_correction_bias"].abs().max() > 10 * BIAS_STEP  # it was balanced by it
    assert json.loads((folder / "config.json").read_text()) == TINY
    assert {file.name for file in folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "heldout",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_our_model_loads_it_and_agrees_with_transformers(trained):
    folder = trained / "demo"
    tokenizer = load_tokenizer(folder)
    ids = encode_chat(tokenizer, [{"role": "user", "content": (folder / "heldout" / "text.txt").read_text()[:600]}])
    ours = Generator(load_model(open_model(folder, dtype="fp32")), max_batch=1, max_model_len=1024).score(ids)
    theirs = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0]
    assert len(ids) > 150
    # Two orders of fp32 sums over two layers; the largest difference seen was 1.2e-6.
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-4)


def test_files_hold_the_model_that_was_trained(tmp_path):
    model = build_model(TINY, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 3).bfloat16())  # so that the files' rounding changes nothing
        (moe,) = moe_layers(model)
        moe.gate.e_score_correction_bias.copy_(torch.randn(8) / 3)  # fp32: a rounded one would choose other experts
    texts = Corpus(Difficulty(), countries=10).training(random.Random(0), few_shot=False)
    write_checkpoint(model.state_dict(), TINY, build_tokenizer((next(texts) for _ in range(300)), 640), tmp_path)
    ids = torch.randint(640, (200,))
    with torch.no_grad():
        expected = model.eval()(input_ids=ids[None]).logits[0]
    ours = Generator(load_model(open_model(tmp_path, dtype="fp32")), max_batch=1, max_model_len=256).score(ids.tolist())
    # Sums of fp32 in another order; the largest difference seen was 1.04e-5.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_wide_experts_are_transformers_experts():
    torch.manual_seed(0)
    config = DeepseekV3Config(**TINY)
    config._experts_implementation = "eager"
    (moe,) = moe_layers(DeepseekV3ForCausalLM(config))
    hidden = torch.randn(1, 40, 64) * 10
    expected = moe(hidden)
    moe.experts = WideExperts(moe.experts)
    # fp32 sums in another order
    torch.testing.assert_close(moe(hidden), expected, rtol=1e-5, atol=1e-5)
    _, weights, chosen = moe.gate(hidden)
    assert weights.shape == (40, 2)
    assert torch.equal(moe.experts.load, torch.bincount(chosen.flatten(), minlength=8).float())


def test_the_router_stays_fp32_under_autocast():
    """As at inference; a logit rounded to BF16 would train for other choices than the model then makes."""
    (moe,) = moe_layers(build_model(TINY, CPU))
    hidden = torch.randn(1, 40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = moe.gate(hidden)[0]
        assert moe.shared_experts(hidden).dtype == torch.bfloat16
    assert torch.equal(logits, torch.nn.functional.linear(hidden[0], moe.gate.weight))


def test_bias_turns_tokens_away_from_the_crowded_expert():
    torch.manual_seed(0)
    model = build_model(TINY, CPU)
    (moe,) = moe_layers(model)
    moe.gate.e_score_correction_bias[3] = 0.5  # everybody's choice
    balance = Balance(model)
    ids = torch.randint(640, (8, 64))
    shares = []
    for _ in range(400):
        with torch.no_grad():
            model(input_ids=ids)
        balance.step()
        shares.append(balance.usage()[0])
    assert shares[0][3] == pytest.approx(0.5)  # one of each token's two
    assert max(shares[-1]) < 0.16  # even is 0.125
    assert min(shares[-1]) > 0.09


def test_the_real_size_fits_into_the_repository(tmp_path):
    """Files below 16 MB, all of them below 24 MB with 5,000 questions of each kind, and TP up to 8."""
    corpus = Corpus(Difficulty())
    texts = corpus.training(random.Random(0), few_shot=False)
    tokenizer = build_tokenizer((next(texts) for _ in range(2000)), DEMO["vocab_size"])
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEMO))
    write_checkpoint(model.state_dict(), DEMO, tokenizer, tmp_path)
    write_held_out(corpus, tmp_path / "heldout", 5000, seed=0)
    sizes = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
    assert max(sizes) < 16e6
    assert sum(sizes) < 24e6
    files = open_model(tmp_path)
    assert (files.config.latent_dim, files.config.qk_rope_head_dim) == (576, 64)
    assert files.config.max_position_embeddings >= 16384
    assert files.config.rope.factor > 1
    for ranks in (1, 2, 4, 8):
        check_tp_size(ranks, files.config.sharded_dimensions())


def test_the_letters_of_four_choice_questions_weigh_more():
    texts = Corpus(Difficulty(), countries=10).training(random.Random(0), few_shot=False)
    tokenizer = build_tokenizer((next(texts) for _ in range(300)), 640)
    weight = token_weights(tokenizer)
    assert sorted(tokenizer.decode([token]) for token in weight.topk(4).indices.tolist()) == [" A", " B", " C", " D"]
    assert weight.sort().values.tolist() == [1.0] * 636 + [LETTER_WEIGHT] * 4


def test_learning_rate_and_rows_follow_time_or_updates():
    plan = Plan(minutes=2.0, updates=None, batch_tokens=1, rows=(1, 2), learning_rate=1.0, seed=0, workers=0)
    assert plan.progress(update=5, seconds=60.0) == 0.5
    assert plan.warm_up == 200
    plan = Plan(minutes=None, updates=50, batch_tokens=1, rows=(1, 2), learning_rate=1.0, seed=0, workers=0)
    assert plan.progress(update=5, seconds=60.0) == 0.1
    assert plan.warm_up == 10


@pytest.mark.parametrize(
    "options, message",
    [
        (["--batch-tokens", "1000"], "--batch-tokens must be a multiple of 2048, got 1000"),
        (["--updates", "0"], "--updates must be 1 or more, got 0"),
        (["--minutes", "0"], "--minutes must be above 0, got 0.0"),
        (["--minutes", "1", "--updates", "5"], "not allowed with argument"),
        (["--steps", "5", "3"], "steps must be two numbers from 2 up, the smaller one first, got 5 and 3"),
        (["--operand", "5"], "operand must be 20 or more, got 5"),
        (["--countries", "5001"], "countries must be from 10 to 5000, got 5001"),
        (["--json", "/nowhere/x.json"], "cannot be written: its folder is missing"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_writes_nothing(script, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        script.main(["--output", str(tmp_path / "demo"), "--device", "cpu", *options])
    assert ended.value.code != 0
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1]
    assert error[-1].startswith("error: ")
    assert not (tmp_path / "demo").exists()


def test_a_folder_that_exists_is_left_alone(script, tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path), *COMMAND])
    assert "exists already: delete it or choose another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["precious.txt"]


def test_torchrun_is_refused(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "world_size", lambda: 2)
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path / "demo"), *COMMAND])
    assert "the training runs in one process" in capsys.readouterr().err
