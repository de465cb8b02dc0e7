"""GSM8K's files and prompts, and what counts as right, invalid and truncated."""

import json

import pytest
from eval_fakes import write_gsm8k

from moe_int8.evals.gsm8k import INSTRUCTION, Gsm8k
from moe_int8.evals.prompts import Output


def task(folder, shots=2, num_questions=None, chat=False):
    return Gsm8k(folder, shots=shots, num_questions=num_questions, chat=chat)


def output(text, finish="stop", **more):
    return Output(text, finish, 10, 5, **more)


def test_the_prompt_is_shots_and_question_in_order(tmp_path):
    write_gsm8k(tmp_path, 3)
    (prompt, *_) = task(tmp_path).prompts
    assert prompt.text() == (
        "Question: What is 0 less 1?\nAnswer: It is -1.\n#### -1\n\n"
        "Question: What is 1 less 1?\nAnswer: It is 0.\n#### 0\n\n"
        "Question: How much is 0 and 0?\nAnswer:"
    )
    assert prompt.text(dropped=1).startswith("Question: What is 1 less 1?")
    assert prompt.text(dropped=2) == "Question: How much is 0 and 0?\nAnswer:"


def test_chat_gives_shots_as_turns(tmp_path):
    write_gsm8k(tmp_path, 3)
    messages = task(tmp_path, shots=1, chat=True).prompts[1].messages()
    assert messages == [
        {"role": "user", "content": INSTRUCTION + "What is 0 less 1?"},
        {"role": "assistant", "content": "It is -1.\n#### -1"},
        {"role": "user", "content": INSTRUCTION + "How much is 1 and 1?"},
    ]


def test_a_file_alone_gives_its_first_questions_as_shots_and_does_not_ask_them(tmp_path):
    write_gsm8k(tmp_path, 5)
    (tmp_path / "train.jsonl").unlink()
    alone = task(tmp_path / "test.jsonl")
    assert [question["question"] for question in alone.questions] == [f"How much is {i} and {i}?" for i in (2, 3, 4)]
    assert "How much is 1 and 1?" in alone.prompts[0].text()
    assert len(task(tmp_path / "test.jsonl", shots=0).questions) == 5


def test_num_questions_takes_the_first(tmp_path):
    write_gsm8k(tmp_path, 5)
    assert len(task(tmp_path, num_questions=2).prompts) == 2
    assert len(task(tmp_path, num_questions=99).prompts) == 5


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 must be"),
        ('{"question": "a"}', "line 2 must be"),
        ('{"question": "a", "answer": "five"}', "line 2: the answer has no number"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    good = json.dumps({"question": "a", "answer": "#### 1"})
    (tmp_path / "test.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        task(tmp_path, shots=0)


def test_what_is_no_text_is_named(tmp_path):
    (tmp_path / "test.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"test\.jsonl is no UTF-8 text"):
        task(tmp_path, shots=0)


def test_too_few_questions_for_the_shots_and_none_at_all(tmp_path):
    write_gsm8k(tmp_path, 3, train=1)
    with pytest.raises(ValueError, match="lower --shots"):
        task(tmp_path, shots=2)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no questions"):
        task(tmp_path / "empty.jsonl")


GRADED = {  # of the answer 4: correct, strict_correct, invalid, truncated
    "2 + 2 = 4\n#### 4": (True, True, False, False),
    "So it is $4.00.": (True, False, False, False),
    "#### 5": (False, False, False, False),
    "I cannot tell.": (False, False, True, False),
    "<think>4": (False, False, True, True),
    "<think>5</think>#### 4": (True, True, False, False),
    "#### 4\n\nQuestion: How much is 9 and 9?\nAnswer: #### 18": (True, True, False, False),
}


@pytest.mark.parametrize("text", GRADED)
def test_c65_c66_answers_are_graded(tmp_path, text):
    write_gsm8k(tmp_path, 3)
    record = task(tmp_path).record(2, output(text))
    assert tuple(record[name] for name in ("correct", "strict_correct", "invalid", "truncated")) == GRADED[text]
    assert record["target"] == "4"


def test_c79_the_limit_truncates_but_not_behind_a_run_on(tmp_path):
    write_gsm8k(tmp_path, 3)
    grade = task(tmp_path).record
    assert grade(2, output("2 + 2", "length"))["truncated"]
    assert not grade(2, output("#### 4\n\nQuestion: and", "length"))["truncated"]
    unclosed = grade(2, output("it may be 4", "length", thinking=True))
    assert (unclosed["invalid"], unclosed["correct"], unclosed["truncated"]) == (True, False, True)


def test_c70_a_failure_is_wrong_and_neither_invalid_nor_truncated(tmp_path):
    write_gsm8k(tmp_path, 3)
    record = task(tmp_path).record(0, output("", "error", error="HTTP 500", thinking=True))
    assert not any(record[name] for name in ("correct", "strict_correct", "invalid", "truncated"))
