"""scripts/generate.py as a user meets it: answers, streaming, and one line for everything that can be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import VOCAB_SIZE, write_tokenizer
from official_layout import TINY, write_official_checkpoint
from ranks import load_script
from safetensors.torch import load_file, save_file

from moe_int8.models.deepseek.convert import Settings, convert

ROOT = Path(__file__).parents[2]
CONFIG = TINY | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The same random model in FP8, BF16 and INT8."""
    root = tmp_path_factory.mktemp("checkpoints")
    write_official_checkpoint(root / "fp8", CONFIG)
    write_tokenizer(root / "fp8")
    for form in ("int8", "bf16"):
        convert(root / "fp8", root / form, Settings(to=form))
    return {form: root / form for form in ("fp8", "int8", "bf16")}


def generate(capsys, *argv: object) -> tuple[int, str, list[str]]:
    """Exit status, stdout and the lines on stderr that are not progress bars."""
    status = 0
    try:
        load_script("generate").main([*map(str, argv), "--device", "cpu"])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, [line for line in err.splitlines() if line.strip() and "\r" not in line]


def test_one_prompt_streams_its_answer_to_stdout(folders, capsys):
    status, out, err = generate(
        capsys, "--model", folders["int8"], "--prompt", "ab", "--max-new-tokens", 6, "--dtype", "fp32"
    )
    assert status == 0
    assert out.strip()
    assert any(line.startswith("memory a rank: weights") for line in err)
    assert any("tokens/s" in line for line in err)


def test_several_prompts_and_json_hold_what_each_gets_alone(folders, capsys, tmp_path):
    common = ["--model", folders["int8"], "--dtype", "fp32", "--max-new-tokens", 8]
    prompts = ["ab", "a longer prompt", "c"]
    generate(
        capsys, *common, *[word for prompt in prompts for word in ("--prompt", prompt)], "--json", tmp_path / "all.json"
    )
    together = json.loads((tmp_path / "all.json").read_text())
    for prompt, answer in zip(prompts, together["answers"]):
        generate(capsys, *common, "--prompt", prompt, "--json", tmp_path / "one.json")
        (alone,) = json.loads((tmp_path / "one.json").read_text())["answers"]
        assert answer["prompt"] == prompt
        assert answer == alone
    assert together["speed"]["decode_tokens"] == sum(len(answer["token_ids"]) - 1 for answer in together["answers"])


def test_two_ranks_say_the_same_as_one(folders, capsys, tmp_path):
    common = [
        "--model",
        folders["int8"],
        "--dtype",
        "fp32",
        "--max-new-tokens",
        8,
        "--prompt",
        "ab",
        "--prompt",
        "cdefg",
    ]
    generate(capsys, *common, "--json", tmp_path / "one.json")
    run = torchrun(*common, "--json", tmp_path / "two.json")
    assert run.returncode == 0, run.stderr
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["answers"] for name in ("one", "two"))
    assert one == two
    assert run.stdout.count("--- 0:") == 1  # printed by one rank


def test_chat_answers_and_ends_at_an_empty_line(folders, capsys, monkeypatch):
    lines = iter(["hello", "more", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    status, out, _ = generate(capsys, "--model", folders["int8"], "--chat", "--max-new-tokens", 4)
    assert status == 0
    assert out.count("[cut: length]") == 2
    assert next(lines, None) is None


def test_a_chat_that_outgrows_its_context_begins_anew(folders, capsys, monkeypatch):
    lines = iter(["hello", "more", "x" * 100, "again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    limits = ["--max-model-len", 60]  # the answers fill it: without --max-new-tokens they may
    status, out, err = generate(capsys, "--model", folders["int8"], "--chat", "--ignore-eos", *limits)
    assert status == 0
    assert "an empty line ends the chat" in err
    assert out.count("[cut: length]") == 3
    assert sum("outgrown its 60 tokens (--max-model-len): it begins anew" in line for line in err) == 2
    assert sum("of 60 tokens (--max-model-len) and leaves no room for an answer" in line for line in err) == 1
    assert next(lines, None) is None


def test_prompts_file_of_lines_and_of_json_lines(folders, capsys, tmp_path):
    (tmp_path / "p.txt").write_text("ab\n\ncd\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    outs = [
        generate(capsys, "--model", folders["int8"], "--prompts-file", tmp_path / name, "--max-new-tokens", 4)[1]
        for name in ("p.txt", "p.jsonl")
    ]
    assert outs[0] == outs[1]
    assert "--- 1: cd" in outs[0]


def test_a_stop_string_ends_the_answer_before_it(folders, capsys, tmp_path):
    common = ["--model", folders["int8"], "--dtype", "fp32", "--prompt", "ab", "--json", tmp_path / "a.json"]
    generate(capsys, *common, "--max-new-tokens", 12)
    text = json.loads((tmp_path / "a.json").read_text())["answers"][0]["text"]
    stop = next(text[i : i + 2] for i in range(2, len(text) - 1) if text.index(text[i : i + 2]) == i)
    generate(capsys, *common, "--max-new-tokens", 12, "--stop", stop)
    (answer,) = json.loads((tmp_path / "a.json").read_text())["answers"]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


WRONG = {
    "unknown option": (["--model", "{int8}", "--prompt", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
    "no prompt": (["--model", "{int8}"], "one of the arguments --prompt --prompts-file --chat is required"),
    "an FP8 checkpoint": (["--model", "{fp8}", "--prompt", "a"], "python scripts/convert.py {fp8} {fp8}-INT8"),
    "no such folder": (["--model", "/nonexistent", "--prompt", "a"], "/nonexistent is not a folder"),
    "no config.json": (["--model", "{empty}", "--prompt", "a"], "no config.json"),
    "a missing shard": (["--model", "{incomplete}", "--prompt", "a"], ".safetensors is missing, though"),
    "a missing tensor": (["--model", "{hole}", "--prompt", "a"], "model.norm.weight"),
    "float16": (["--model", "{int8}", "--prompt", "a", "--dtype", "fp16"], "invalid choice: 'fp16'"),
    "negative temperature": (["--model", "{int8}", "--prompt", "a", "--temperature", "-1"], "temperature"),
    "a prompt that does not fit": (["--model", "{int8}", "--prompt", "abcdef", "--max-model-len", "4"], "7 tokens"),
    "more than the context": (["--model", "{int8}", "--prompt", "a", "--max-model-len", "999"], "context of 256"),
    "no sequence at a time": (
        ["--model", "{int8}", "--prompt", "a", "--max-batch", "0"],
        "max_batch must be at least 1",
    ),
    "no context": (["--model", "{int8}", "--prompt", "a", "--max-model-len", "0"], "max_model_len must be at least 1"),
    "a system message without a chat": (["--model", "{int8}", "--prompt", "a", "--system", "b"], "--system needs"),
    "answers into no folder": (["--model", "{int8}", "--prompt", "a", "--json", "/nonexistent/a"], "cannot be written"),
    "no prompts in the file": (["--model", "{int8}", "--prompts-file", "{blank}"], "holds no prompts"),
    "a file that is not there": (["--model", "{int8}", "--prompts-file", "/nonexistent"], "/nonexistent"),
}


@pytest.fixture(scope="module")
def broken(folders, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("broken")
    (root / "empty").mkdir()
    (root / "blank").write_text("\n")
    for name in ("incomplete", "hole"):
        (root / name).mkdir()
        for file in folders["int8"].iterdir():
            (root / name / file.name).write_bytes(file.read_bytes())
    sorted((root / "incomplete").glob("*.safetensors"))[1].unlink()
    index = json.loads((root / "hole" / "model.safetensors.index.json").read_text())
    file = root / "hole" / index["weight_map"].pop("model.norm.weight")
    (root / "hole" / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    return folders | {name: root / name for name in ("empty", "blank", "incomplete", "hole")}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case, broken, capsys):
    argv, message = ([part.format(**broken) for part in WRONG[case][0]], WRONG[case][1].format(**broken))
    status, out, err = generate(capsys, *argv)
    errors = [line for line in err if line.startswith("error")]
    assert status != 0
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in "".join(err)
    assert out == ""


def torchrun(*argv: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launch, ROOT / "scripts" / "generate.py", *map(str, argv), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
    )


def test_a_size_that_does_not_divide_is_said_once_for_all_ranks(folders):
    run = torchrun("--model", folders["int8"], "--prompt", "a", ranks=3)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error")]
    assert run.returncode != 0
    assert errors == ["error: tensor-parallel size 3 does not divide num_attention_heads = 2; use one of 1, 2"]
