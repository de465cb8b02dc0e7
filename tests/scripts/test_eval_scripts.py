"""scripts/eval_gsm8k.py and eval_mmlu.py with models of known answers, in process and behind a server, and as a user
meets them: continued after a kill, on two ranks, and one line for what is wrong."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from eval_fakes import (
    LETTER_VOCAB,
    asked,
    completed,
    fake_generator,
    prompt_of,
    serve,
    write_gsm8k,
    write_letter_tokenizer,
    write_mmlu,
)
from official_layout import TINY, write_official_checkpoint
from ranks import load_script

from moe_int8.evals import command
from moe_int8.models.deepseek.convert import Settings, convert

ROOT = Path(__file__).parents[2]
CONFIG = TINY | {"vocab_size": LETTER_VOCAB, "max_position_embeddings": 2048}
WRITTEN = {"completion": " {}.\n\nMore questions\nAnswer: C", "chat": "Let me see, is it A?\n\nAnswer: {}"}
SUBJECTS = {"anatomy": 8, "astronomy": 4, "sociology": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model whose tokenizer has a token for each letter."""
    root = tmp_path_factory.mktemp("checkpoint")
    write_official_checkpoint(root / "fp8", CONFIG)
    write_letter_tokenizer(root / "fp8")
    convert(root / "fp8", root / "int8", Settings(to="int8"))
    return root / "int8"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_gsm8k(root / "gsm8k", 10)
    write_mmlu(root / "mmlu", SUBJECTS)
    return root


@pytest.fixture(autouse=True)
def _in_short_time(monkeypatch) -> None:
    monkeypatch.setattr("moe_int8.evals.server.FIRST_WAIT", 0.001)


def run(name: str, *argv: object) -> int:
    """The exit status."""
    try:
        load_script(name).main([*map(str, argv)])
    except SystemExit as stop:
        return stop.code
    return 0


def result(file: Path) -> dict:
    return json.loads(file.read_text())


def same(file: Path) -> dict:
    """A result without its timing."""
    return {name: value for name, value in result(file).items() if name != "timing"}


def fake_model(monkeypatch, folder: Path, answers: dict[str, str], finish: str = "stop") -> type:
    fake = fake_generator(folder, answers, finish)
    monkeypatch.setattr("moe_int8.models.deepseek.start.Generator", fake)
    monkeypatch.setattr("moe_int8.models.deepseek.start.load_model", lambda *_, **__: None)
    return fake


def sum_answers() -> dict[str, str]:
    """Of ten questions seven right (five of them behind ####), two wrong, one without a number."""
    said = {f"How much is {i} and {i}?": f" {i} and {i}\n#### {2 * i}" for i in range(5)}
    said |= {f"How much is {i} and {i}?": f" It is ${2 * i}.00." for i in (5, 6)}
    said |= {f"How much is {i} and {i}?": "<think>16</think> #### 1" for i in (7, 8)}
    return said | {"How much is 9 and 9?": " I cannot tell."}


def letter_answers() -> dict[str, str]:
    """Right in 6 of 8, 1 of 4 and 3 of 6 questions."""
    right = {"anatomy": 6, "astronomy": 1, "sociology": 3}
    return {
        f"{subject} {i}?": "ABCD"[(i + (i >= right[subject])) % 4]
        for subject, count in SUBJECTS.items()
        for i in range(count)
    }


def check_gsm8k(found: dict) -> None:
    assert (found["score"], found["n"], found["invalid"], found["truncated"], found["failed"]) == (0.7, 10, 1, 0, 0)
    assert found["stderr"] == pytest.approx(math.sqrt(0.7 * 0.3 / 9), rel=1e-14)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["flexible"]["score"] == 0.7
    assert (rows["strict"]["score"], rows["strict"]["invalid"]) == (0.5, 3)
    assert [question["correct"] for question in found["questions"]] == [True] * 7 + [False] * 3


def check_mmlu(found: dict) -> None:
    rows = {row["name"]: row for row in found["rows"]}
    scores = {"anatomy": 6 / 8, "astronomy": 1 / 4, "sociology": 3 / 6, "other": 6 / 8, "STEM": 1 / 4}
    scores |= {"social sciences": 3 / 6, "all questions": 10 / 18}
    assert {name: row["score"] for name, row in rows.items()} == scores
    assert (found["score"], found["n"], found["invalid"]) == (10 / 18, 18, 0)
    assert found["stderr"] == pytest.approx(math.sqrt(10 / 18 * 8 / 18 / 17), rel=1e-14)


@pytest.mark.parametrize("style", ["completion", "chat"])
def test_gsm8k_in_process_gives_the_known_score(folder, data, tmp_path, monkeypatch, capsys, style):
    fake = fake_model(monkeypatch, folder, sum_answers())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    out = tmp_path / "a.json"
    argv = ["--model", folder, "--data", data / "gsm8k", "--style", style, "--max-new-tokens", 64, "--parallel", 4]
    assert run("eval_gsm8k", *argv, "--output", out) == 0
    check_gsm8k(result(out))
    assert fake.batches == [4, 4, 2]
    assert fake.prompts[0].count("What is") == 5  # shots
    printed, bar = capsys.readouterr()
    assert "flexible         10   0.7000   0.1528        1" in printed
    assert "accuracy 0.7000" in bar


@pytest.mark.parametrize("style", ["completion", "chat"])
def test_gsm8k_from_a_server_gives_the_known_score(data, tmp_path, style):
    answers = sum_answers()
    out = tmp_path / "a.json"
    with serve(lambda _, body: completed(answers[asked(prompt_of(body), answers)])) as url:
        assert run("eval_gsm8k", "--base-url", url, "--data", data / "gsm8k", "--style", style, "--output", out) == 0
    check_gsm8k(result(out))
    assert result(out)["settings"]["--model"] == "fake-model"
    assert result(out)["timing"]["output_tokens"] == 30


@pytest.mark.parametrize("options", [[], ["--generate"], ["--style", "chat"]], ids=["logprobs", "generate", "chat"])
def test_c67_c68_c69_mmlu_in_process_gives_the_known_averages(folder, data, tmp_path, monkeypatch, capsys, options):
    said = letter_answers()
    written = {ask: WRITTEN["chat" if "chat" in options else "completion"].format(said[ask]) for ask in said}
    fake = fake_model(monkeypatch, folder, written if options else said)
    out = tmp_path / "a.json"
    argv = ["--model", folder, "--data", data / "mmlu", *options, "--max-new-tokens", 64, "--parallel", 5]
    assert run("eval_mmlu", *argv, "--output", out) == 0
    check_mmlu(result(out))
    assert fake.batches == ([5, 5, 5, 3] if options else [5, 3, 4, 5, 1])  # scored by subject
    assert re.search(r"all questions +18 +0.5556 +0.1205 +0\n", capsys.readouterr().out)


@pytest.mark.parametrize("style", ["completion", "chat"])
def test_c67_c68_mmlu_from_a_server_gives_the_known_averages(data, tmp_path, style):
    answers = letter_answers()
    out = tmp_path / "a.json"

    def reply(_, body):
        assert body.get("stop") == (["\n\n"] if style == "completion" else None)
        return completed(WRITTEN[style].format(answers[asked(prompt_of(body), answers)]))

    with serve(reply) as url:
        assert run("eval_mmlu", "--base-url", url, "--data", data / "mmlu", "--style", style, "--output", out) == 0
    check_mmlu(result(out))


def test_c70_a_failed_request_counts_as_wrong_and_is_asked_again(data, tmp_path, capsys):
    answers = sum_answers()
    out, down = tmp_path / "a.json", [True]

    def reply(_, body):
        question = asked(prompt_of(body), answers)
        return (500, b"no memory") if down[0] and "9 and 9" in question else completed(answers[question])

    with serve(reply) as url:
        argv = ["--base-url", url, "--data", data / "gsm8k", "--output", out]
        assert run("eval_gsm8k", *argv) == 1
        first = result(out)
        assert (first["score"], first["failed"], first["n"], first["invalid"]) == (0.7, 1, 10, 0)
        printed, err = capsys.readouterr()
        assert "failed 1" in printed
        assert "error: 1 of 10 requests failed and count as wrong; the first: HTTP 500: no memory" in err
        down[0] = False
        assert run("eval_gsm8k", *argv) == 0
    check_gsm8k(result(out))


def test_c66_a_think_block_that_never_closes_is_invalid_and_truncated(folder, data, tmp_path, monkeypatch):
    answers = dict.fromkeys(sum_answers(), "<think>it may be 0")
    fake_model(monkeypatch, folder, answers, finish="length")
    run("eval_gsm8k", "--model", folder, "--data", data / "gsm8k", "--output", tmp_path / "a.json")
    found = result(tmp_path / "a.json")
    assert (found["score"], found["invalid"], found["truncated"]) == (0.0, 10, 10)


def test_c66_a_server_whose_template_opens_the_think_block(data, tmp_path):
    with serve(lambda *_: completed("it may be 0", "length")) as url:
        argv = ["--base-url", url, "--data", data / "gsm8k", "--style", "chat"]
        run("eval_gsm8k", *argv, "--output", tmp_path / "a.json")
        run("eval_gsm8k", *argv, "--thinking", "--output", tmp_path / "b.json")
    assert result(tmp_path / "a.json")["invalid"] == 0
    assert (result(tmp_path / "b.json")["invalid"], result(tmp_path / "b.json")["truncated"]) == (10, 10)


def test_shots_that_do_not_fit_are_dropped_and_counted(folder, data, tmp_path, monkeypatch):
    fake = fake_model(monkeypatch, folder, sum_answers())
    argv = ["--model", folder, "--data", data / "gsm8k", "--max-new-tokens", 64, "--max-model-len", 256]
    assert run("eval_gsm8k", *argv, "--output", tmp_path / "a.json") == 0
    check_gsm8k(result(tmp_path / "a.json"))
    assert result(tmp_path / "a.json")["dropped_shots"] == 10
    assert fake.prompts[0].count("What is") == 2
    assert "What is 4 less 1?" in fake.prompts[0]  # the last ones stay


@pytest.mark.parametrize("name", ["eval_gsm8k", "eval_mmlu"])
def test_an_interrupted_run_ends_in_the_same_result(folder, data, tmp_path, monkeypatch, name):
    """The real random model, ended in its second batch."""
    argv = ["--model", folder, "--data", data / name.removeprefix("eval_"), "--max-new-tokens", 4, "--parallel", 3]
    argv += ["--shots", 2, "--device", "cpu"]
    assert run(name, *argv, "--output", tmp_path / "whole.json") == 0
    take = command.Run.take

    def end_in_the_second(self, indices, outputs):
        if self.records.done:
            raise KeyboardInterrupt
        take(self, indices, outputs)

    with monkeypatch.context() as patch:
        patch.setattr(command.Run, "take", end_in_the_second)
        assert run(name, *argv, "--output", tmp_path / "cut.json") == 130
    assert not (tmp_path / "cut.json").exists()
    assert len((tmp_path / "cut.json.partial").read_text().splitlines()) == 1 + 3
    assert run(name, *argv, "--output", tmp_path / "cut.json") == 0
    assert same(tmp_path / "cut.json") == same(tmp_path / "whole.json")


def test_continuing_with_other_settings_is_refused_by_name(folder, data, tmp_path, monkeypatch, capsys):
    fake_model(monkeypatch, folder, sum_answers())
    argv = ["--model", folder, "--data", data / "gsm8k", "--output", tmp_path / "a.json", "--device", "cpu"]
    assert run("eval_gsm8k", *argv) == 0
    assert run("eval_gsm8k", *argv) == 1
    assert "a.json is there already" in capsys.readouterr().err
    found = result(tmp_path / "a.json")
    (tmp_path / "a.json").unlink()
    lines = [{"settings": found["settings"]}, {"index": 0, **found["questions"][0]}]  # as a killed run leaves it
    (tmp_path / "a.json.partial").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("eval_gsm8k", *argv, "--shots", 3, "--parallel", 2) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--shots was 5, is 3; --parallel was 32, is 2; questions was" in error


def start(name: str, *argv: object, torchrun: bool = False) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    return subprocess.Popen(
        [sys.executable, *launch, ROOT / "scripts" / f"{name}.py", *map(str, argv)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has SIGINT ignored, which a child would inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_killed_run_is_continued_to_the_same_result(folder, data, tmp_path):
    argv = ["--model", folder, "--data", data / "gsm8k", "--device", "cpu", "--max-new-tokens", 32]
    argv += ["--parallel", 1, "--shots", 1, "--num-questions", 6, "--output"]
    partial = tmp_path / "cut.json.partial"
    killed = start("eval_gsm8k", *argv, tmp_path / "cut.json")
    deadline = time.monotonic() + 60
    while not partial.exists() or len(partial.read_text().splitlines()) < 3:
        assert killed.poll() is None, killed.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut.json").exists()
    for name in ("cut", "whole"):
        assert run("eval_gsm8k", *argv, tmp_path / f"{name}.json") == 0
    assert same(tmp_path / "cut.json") == same(tmp_path / "whole.json")


def test_an_interruption_does_not_wait_for_the_server(data, tmp_path):
    asked_once, end = threading.Event(), threading.Event()

    def reply(*_):
        asked_once.set()
        end.wait(60)
        return completed("late")

    with serve(reply) as url:
        process = start("eval_gsm8k", "--base-url", url, "--data", data / "gsm8k")
        assert asked_once.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        end.set()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("name", ["eval_gsm8k", "eval_mmlu"])
def test_two_ranks_write_what_one_does(folder, data, tmp_path, name):
    argv = ["--model", folder, "--data", data / name.removeprefix("eval_"), "--device", "cpu", "--dtype", "fp32"]
    argv += ["--max-new-tokens", 8, "--shots", 1, "--parallel", 4, "--num-questions", 5, "--output"]
    two = start(name, *argv, tmp_path / "two.json", torchrun=True)
    assert run(name, *argv, tmp_path / "one.json") == 0
    out, err = two.communicate(timeout=120)
    assert two.returncode == 0, err
    assert out.count("truncated") == 1  # printed by one rank
    one, two_ranks = result(tmp_path / "one.json"), result(tmp_path / "two.json")
    assert (one["settings"].pop("ranks"), two_ranks["settings"].pop("ranks")) == (1, 2)
    for question in [*one["questions"], *two_ranks["questions"]]:
        question.pop("logprobs", None)  # sums over ranks are rounded in another order
    assert one["questions"] == two_ranks["questions"]
    assert one["settings"] == two_ranks["settings"]


WRONG = {
    "no model": ([], "name a checkpoint (--model FOLDER) or a server"),
    "no such folder": (["--model", "/nonexistent"], "/nonexistent is not a folder"),
    "no questions": (["--model", "{folder}", "--data", "/nonexistent"], "/nonexistent"),
    "a negative number of shots": (["--model", "{folder}", "--shots", "-1"], "--shots must be 0 or more, got -1"),
    "nothing at a time": (["--model", "{folder}", "--parallel", "0"], "--parallel must be 1 or more"),
    "no server's address": (["--base-url", "localhost"], "--base-url must begin with http://"),
    "a server that is not there": (["--base-url", "http://127.0.0.1:1/v1"], "is --base-url right?"),
    "thinking without a chat": (["--base-url", "http://127.0.0.1:1/v1", "--thinking"], "--thinking goes with"),
    "an output in no folder": (["--model", "{folder}", "--output", "/nonexistent/a"], "cannot be written"),
    "a question that does not fit": (["--model", "{folder}", "--max-model-len", "20"], "raise --max-model-len"),
    "a temperature below 0": (["--model", "{folder}", "--temperature", "-1"], "temperature must be 0"),
    "the same to a server": (["--base-url", "http://127.0.0.1:1/v1", "--top-p", "2"], "top_p must be above 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case, folder, data, capsys):
    given = [part.format(folder=folder) for part in WRONG[case][0]]
    status = run("eval_gsm8k", "--data", data / "gsm8k", *given)
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if "error: " in line]
    assert status != 0
    assert len(errors) == 1
    assert WRONG[case][1] in errors[0]
    assert "Traceback" not in err
    assert out == ""
