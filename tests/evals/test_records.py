"""A run's records: kept as they come, continued after a kill, and never mixed with another run's."""

import json

import pytest

from moe_int8.evals.records import Records

SETTINGS = {"--shots": 5, "--model": "a"}
ONE, TWO = {"id": "0", "error": None}, {"id": "1", "error": None}


def test_a_continued_run_ends_in_the_same_file(tmp_path):
    whole = Records(tmp_path / "whole.json", SETTINGS)
    whole.add({0: ONE, 1: TWO})
    whole.finish({"score": 1.0})

    Records(tmp_path / "cut.json", SETTINGS).add({1: TWO})
    assert not (tmp_path / "cut.json").exists()
    again = Records(tmp_path / "cut.json", SETTINGS)
    assert again.done == {1: TWO}
    again.add({0: ONE})
    again.finish({"score": 1.0})
    assert (tmp_path / "cut.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.json", "whole.json"]
    result = json.loads((tmp_path / "cut.json").read_text())
    assert result["score"] == 1.0
    assert result["settings"] == SETTINGS
    assert result["questions"] == [ONE, TWO]


def test_half_a_line_is_dropped_and_does_not_spoil_the_next(tmp_path):
    Records(tmp_path / "a.json", SETTINGS).add({0: ONE, 1: TWO})
    partial = tmp_path / "a.json.partial"
    partial.write_text(partial.read_text()[:-5])
    again = Records(tmp_path / "a.json", SETTINGS)
    assert again.done == {0: ONE}
    again.add({1: TWO})
    assert Records(tmp_path / "a.json", SETTINGS).done == {0: ONE, 1: TWO}


def test_the_last_record_of_a_question_counts(tmp_path):
    records = Records(tmp_path / "a.json", SETTINGS)
    records.add({0: ONE | {"correct": False}})
    records.add({0: ONE | {"correct": True}})
    assert Records(tmp_path / "a.json", SETTINGS).done[0]["correct"]


def test_other_settings_are_refused_by_name_and_nothing_is_lost(tmp_path):
    Records(tmp_path / "a.json", SETTINGS).add({0: ONE})
    before = (tmp_path / "a.json.partial").read_bytes()
    with pytest.raises(ValueError, match=r"other settings: --shots was 5, is 0; --seed was None, is 1; remove it"):
        Records(tmp_path / "a.json", SETTINGS | {"--shots": 0, "--seed": 1})
    assert (tmp_path / "a.json.partial").read_bytes() == before


def test_a_run_that_got_no_answer_may_be_started_with_other_settings(tmp_path):
    Records(tmp_path / "a.json", SETTINGS).add({0: ONE | {"error": "HTTP 500"}})
    Records(tmp_path / "a.json", SETTINGS | {"--shots": 0}).add({0: ONE})
    assert Records(tmp_path / "a.json", SETTINGS | {"--shots": 0}).done == {0: ONE}


def test_a_finished_result_is_not_overwritten(tmp_path):
    (tmp_path / "a.json").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        Records(tmp_path / "a.json", SETTINGS)
    assert (tmp_path / "a.json").read_text() == "mine"


@pytest.mark.parametrize("content", ["", "{}\n", "[]\n", "no JSON\n", '{"settings": {}}\n[1]\n', '{"settings": []}\n'])
def test_a_partial_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "a.json.partial").write_text(content)
    with pytest.raises(ValueError, match="no begun evaluation"):
        Records(tmp_path / "a.json", SETTINGS)
    assert (tmp_path / "a.json.partial").read_text() == content


def test_a_partial_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.json.partial").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="no begun evaluation"):
        Records(tmp_path / "a.json", SETTINGS)


def test_failed_questions_are_asked_again(tmp_path):
    records = Records(tmp_path / "a.json", SETTINGS)
    records.add({0: ONE, 1: TWO | {"error": "HTTP 500"}})
    records.finish({"failed": 1})
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == 1
    again = Records(tmp_path / "a.json", SETTINGS)
    assert again.done == {0: ONE}
    again.add({1: TWO})
    again.finish({"failed": 0})
    assert json.loads((tmp_path / "a.json").read_text())["failed"] == 0
    assert not (tmp_path / "a.json.partial").exists()


def test_without_an_output_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = Records(None, SETTINGS)
    records.add({1: TWO, 0: ONE})
    records.finish({})
    assert records.in_order() == [ONE, TWO]
    assert not list(tmp_path.iterdir())
