"""scripts/compare_frameworks.py against a fake server."""

import json
from itertools import count

import pytest
from eval_fakes import completed, prompt_of, serve
from ranks import load_script

compare_frameworks = load_script("compare_frameworks")
PROMPTS = compare_frameworks.PROMPTS


def ask(tmp_path, reply, *arguments: str) -> None:
    with serve(reply) as url:
        compare_frameworks.main(["--base-url", url, *arguments])


def test_agreement_and_speed_of_two_servers(tmp_path, capsys):
    off, figures = str(tmp_path / "off.json"), tmp_path / "figures.json"
    ask(tmp_path, lambda path, body: completed(f"0123456789 {prompt_of(body)}"), "--save", off)
    assert json.loads((tmp_path / "off.json").read_text())["answers"] == [f"0123456789 {p}" for p in PROMPTS]

    def reply(path, body):
        assert path == "/v1/completions"
        assert (body["temperature"], body["max_tokens"]) == (0.0, 128)
        prompt = prompt_of(body)
        if prompt == PROMPTS[3]:
            return completed("0123456789")  # a part of the answer is equal
        return completed("something else" if prompt == PROMPTS[7] else f"0123456789 {prompt}")

    ask(tmp_path, reply, "--against", off, "--json", str(figures))
    found = json.loads(figures.read_text())
    assert found["equal"] == 18
    assert found["equal_until"] == pytest.approx((18 + 10 / (11 + len(PROMPTS[3]))) / 20)
    output = capsys.readouterr().out
    assert "equal answers                 18 of 20" in output
    assert "speed, on to off" in output


@pytest.mark.parametrize("content, arguments, message", [
    ("{}", [], "does not hold the answers"),
    ("[]", [], "off.json"),
    (json.dumps({"answers": [""] * 20, "tokens_per_second": 1.0, "max_tokens": 7}), [], "--max-tokens 7, not 128"),
    (None, [], "off.json"),
    ("{}", ["--max-tokens", "0"], "--max-tokens must be"),
])  # fmt: skip
def test_what_cannot_be_compared_is_named(content, arguments, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "off.json").write_text(content)
    with pytest.raises(SystemExit, match=r"[12]"):
        ask(tmp_path, lambda *_: completed("x"), "--against", str(tmp_path / "off.json"), *arguments)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line


def test_an_answer_that_fails_ends_the_comparison(tmp_path, capsys):
    asked = count()

    def reply(path, body):
        return completed("x") if next(asked) < 5 else (400, {"error": {"message": "no such thing"}})

    with pytest.raises(SystemExit, match="1"):
        ask(tmp_path, reply, "--save", str(tmp_path / "off.json"))
    assert "no such thing" in capsys.readouterr().err
    assert not (tmp_path / "off.json").exists()
