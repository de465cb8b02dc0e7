"""scripts/compare_evals.py on results with known pairs."""

import json
from pathlib import Path

import pytest
from ranks import load_script

from moe_int8.evals.statistics import Paired, score


def run(*argv: object) -> int:
    try:
        load_script("compare_evals").main([*map(str, argv)])
    except SystemExit as stop:
        return stop.code
    return 0


def write(file: Path, right: list[bool], task: str = "gsm8k", first: int = 0) -> Path:
    questions = [
        {"id": str(i), "question": f"question {i}", "target": "1", "correct": correct}
        for i, correct in enumerate(right, first)
    ]
    rows = [{"name": name, "kind": "extraction", **score(right), "invalid": 0} for name in ("strict", "flexible")]
    file.write_text(json.dumps({"task": task, **score(right), "failed": 0, "rows": rows, "questions": questions}))
    return file


A = [True] * 80 + [True] * 6 + [False] * 10 + [False] * 4
B = [True] * 80 + [False] * 6 + [True] * 10 + [False] * 4


def test_pairs_by_question_test_and_interval(tmp_path, capsys):
    a, b = write(tmp_path / "a.json", A), write(tmp_path / "b.json", B)
    assert run(a, b, b, "--json", tmp_path / "pairs.json") == 0
    pairs = json.loads((tmp_path / "pairs.json").read_text())["pairs"]
    assert [pair["b"] for pair in pairs] == [str(b)] * 2
    expected = Paired(80, 6, 10, 4)
    assert {name: pairs[0][name] for name in ("both", "only_a", "only_b", "neither", "n")} == {
        "both": 80,
        "only_a": 6,
        "only_b": 10,
        "neither": 4,
        "n": 100,
    }
    assert pairs[0]["interval95"] == list(expected.interval())
    assert pairs[0]["mcnemar_p"] == pytest.approx(0.454498, abs=1e-6)  # 2 P(X <= 6), X binomial (16, 1/2): 29786/65536
    printed = capsys.readouterr().out
    assert f"both right 80, only {a} 6, only {b} 10, neither 4" in printed
    assert "difference +0.0400" in printed
    assert "McNemar p 0.4545" in printed


def test_only_questions_of_both_are_compared_and_the_rest_is_said(tmp_path, capsys):
    a, b = write(tmp_path / "a.json", A), write(tmp_path / "b.json", B[20:90], first=20)
    assert run(a, b) == 0
    assert "70 questions (30 asked by one only)" in capsys.readouterr().out


def test_the_runs_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    a, b = write(tmp_path / "a.json", A), write(tmp_path / "b.json", B)
    assert run(a, b, "--plot", tmp_path / "plot.png") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    a = write(tmp_path / "a.json", A)
    assert run(a, a, "--plot", tmp_path / "plot.png") == 1
    assert "pip install 'moe-int8[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["one file", "no result", "another task", "other questions", "none shared"])
def test_what_cannot_be_compared_is_said_in_one_line(tmp_path, capsys, case):
    a = write(tmp_path / "a.json", A)
    b = tmp_path / "b.json"
    if case == "no result":
        b.write_text('{"answers": []}')
    elif case == "another task":
        write(b, A, task="mmlu")
    elif case == "other questions":
        b.write_text(write(b, A).read_text().replace('"question 7"', '"question seven"'))
    elif case == "none shared":
        write(b, A, first=1000)
    messages = {
        "one file": "name two files or more",
        "no result": "b.json is no result of an evaluation script",
        "another task": "are different evaluations: gsm8k and mmlu",
        "other questions": "question 7 differs",
        "none shared": "they share none",
    }
    assert run(a, *([] if case == "one file" else [b])) != 0
    out, err = capsys.readouterr()
    assert messages[case] in err
    assert err.count("\n") == 1
    assert out == ""
