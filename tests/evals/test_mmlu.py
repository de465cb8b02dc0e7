"""MMLU's files with and without a header, prompts, averages and letters."""

import pytest
from eval_fakes import write_mmlu

from moe_int8.evals.mmlu import CATEGORIES, CHOICES, Mmlu
from moe_int8.evals.prompts import Output


def task(folder, shots=2, num_questions=None, subjects=None, chat=False, generate=False):
    return Mmlu(folder, shots=shots, num_questions=num_questions, subjects=subjects, chat=chat, generate=generate)


def scored(letter):
    return Output("", "stop", 10, 0, logprobs=tuple(0.0 if choice == letter else -3.0 for choice in "ABCD"))


def test_with_and_without_a_header_are_the_same(tmp_path):
    write_mmlu(tmp_path / "plain", {"anatomy": 6})
    write_mmlu(tmp_path / "header", {"anatomy": 6}, header=True)
    plain, header = task(tmp_path / "plain"), task(tmp_path / "header")
    assert plain.prompts == header.prompts
    assert plain.questions == header.questions
    assert [row[-1] for _, _, row in plain.questions] == list("ABCDAB")


def test_the_prompt_ends_where_the_letter_comes(tmp_path):
    write_mmlu(tmp_path, {"world_religions": 1})
    assert task(tmp_path, shots=1).prompts[0].text() == (
        "The following are multiple choice questions (with answers) about world religions.\n\n"
        "world_religions shot 0?\nA. one\nB. two, or 2\nC. three\nD. four\nAnswer: A\n\n"
        "world_religions 0?\nA. one\nB. two, or 2\nC. three\nD. four\nAnswer:"
    )
    messages = task(tmp_path, shots=1, chat=True, generate=True).prompts[0].messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == "Answer: A"
    assert messages[2]["content"].endswith("D. four")


def test_c67_the_score_is_over_questions_not_subjects(tmp_path):
    write_mmlu(tmp_path, {"anatomy": 100, "virology": 300})
    mmlu = task(tmp_path)
    records = []
    for index, (subject, number, row) in enumerate(mmlu.questions):
        right = number < {"anatomy": 90, "virology": 150}[subject]
        wrong = "B" if row[-1] == "A" else "A"
        records.append(mmlu.record(index, scored(row[-1] if right else wrong)))
    rows = {row["name"]: row for row in mmlu.rows(records)}
    assert rows["anatomy"]["score"] == 0.9
    assert rows["virology"]["score"] == 0.5
    assert rows["other"]["score"] == rows["all questions"]["score"] == 0.6
    assert mmlu.rows(records)[-1]["n"] == 400
    assert "STEM" not in rows


def test_the_57_subjects_are_in_one_category_each():
    subjects = [subject for members in CATEGORIES.values() for subject in members]
    assert len(subjects) == len(set(subjects)) == 57


def test_subjects_of_ones_own_count_in_all_questions_only(tmp_path):
    write_mmlu(tmp_path, {"small_world": 4})
    mmlu = task(tmp_path)
    rows = mmlu.rows([mmlu.record(index, scored("A")) for index in range(4)])
    assert [(row["name"], row["score"]) for row in rows] == [("small_world", 0.25), ("all questions", 0.25)]


def test_num_questions_is_of_each_subject_and_subjects_are_chosen(tmp_path):
    write_mmlu(tmp_path, {"anatomy": 6, "sociology": 6, "virology": 6})
    mmlu = task(tmp_path, num_questions=2, subjects=["virology", "anatomy"])
    assert [mmlu.group(index) for index in range(len(mmlu.prompts))] == ["anatomy"] * 2 + ["virology"] * 2
    with pytest.raises(ValueError, match="no law_test"):
        task(tmp_path, subjects=["anatomy", "law"])


@pytest.mark.parametrize(
    "text", [" B", "B.", "(B)", "<think>A?</think>\n\nAnswer: B", " B\n\nNext question\nAnswer: C"]
)
def test_c68_a_written_letter_counts(tmp_path, text):
    write_mmlu(tmp_path, {"anatomy": 2})
    record = task(tmp_path, generate=True).record(1, Output(text, "stop", 9, 2))
    assert (record["chosen"], record["correct"], record["invalid"]) == ("B", True, False)


def test_unclosed_thinking_is_invalid_and_truncated(tmp_path):
    write_mmlu(tmp_path, {"anatomy": 2})
    record = task(tmp_path, generate=True).record(1, Output("<think>B", "length", 9, 2))
    assert (record["chosen"], record["correct"], record["invalid"], record["truncated"]) == (None, False, True, True)
    cut = task(tmp_path, generate=True).record(1, Output(" B because", "length", 9, 2))
    assert (cut["correct"], cut["truncated"]) == (True, False)


def test_c68_choices_are_scored_with_their_space(tmp_path):
    write_mmlu(tmp_path, {"anatomy": 2})
    assert task(tmp_path).choices == CHOICES == (" A", " B", " C", " D")
    assert task(tmp_path, generate=True).choices == ()


@pytest.mark.parametrize(
    "row, message",
    [
        ("q,a,b,c,d,E", "row 2 must be"),
        ("q,a,b,c,d,4", "row 2 must be"),
        ("q,a,b,c,A", "row 2 must be"),
        ('"q,a,b,c,d,A', "cannot be read"),
    ],
)
def test_a_broken_row_is_named(tmp_path, row, message):
    write_mmlu(tmp_path, {"anatomy": 1})
    (tmp_path / "test" / "anatomy_test.csv").write_text(f"q,a,b,c,d,A\n{row}\n")
    with pytest.raises(ValueError, match=message):
        task(tmp_path)


def test_too_few_shots_and_no_tables(tmp_path):
    write_mmlu(tmp_path / "a", {"anatomy": 1})
    with pytest.raises(ValueError, match="lower --shots"):
        task(tmp_path / "a", shots=6)
    with pytest.raises(ValueError, match="holds no files"):
        task(tmp_path)
    assert len(task(tmp_path / "a", shots=0).prompts[0].shots) == 0
