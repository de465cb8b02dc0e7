"""The benchmarks as a user meets them, on a tiny model: what they write, what they refuse."""

import json
from pathlib import Path

import pytest
from official_layout import TINY, write_official_checkpoint
from ranks import ROOT, Ranks, load_script

from moe_int8.models.deepseek.checkpoint import Checkpoint
from moe_int8.models.deepseek.convert import Settings, convert


@pytest.fixture(autouse=True)
def _scripts_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    write_official_checkpoint(root / "fp8", TINY)
    convert(root / "fp8", root / "int8", Settings())
    return root / "int8"


def row_of(path: Path) -> dict:
    (row,) = json.loads(path.read_text())["rows"]
    return row


def bench_generate(folder: Path, *argv: object) -> None:
    load_script("bench_generate").main(["--model", str(folder), "--device", "cpu", *map(str, argv)])


LENGTHS = ("--input-len", 20, "--output-len", 6, "--requests", 5, "--max-batch", 2, "--ignore-eos")


def test_c73_the_figures_of_a_run_and_its_warm_up_are_printed_and_written(folder, tmp_path, capsys):
    bench_generate(folder, *LENGTHS, "--json", tmp_path / "a.json")
    row, out = row_of(tmp_path / "a.json"), capsys.readouterr().out
    assert (row["requests"], row["failed"], row["gpus"], row["warmup_requests"]) == (5, 0, 1, 2)
    assert (row["input_tokens"], row["output_tokens"]) == (5 * 20, 5 * 6)
    assert row["output_tokens_per_s"] == pytest.approx(30 / row["seconds"])
    assert row["requests_per_min"] == pytest.approx(60 * 5 / row["seconds"])
    assert row["first_token_s"]["p50"] <= row["first_token_s"]["p99"] <= row["seconds"]
    assert "5 requests, 0 failed, up to 2 at a time" in out
    assert "after 2 requests of warm-up" in out
    assert "100 tokens in, 30 tokens out" in out
    assert f"{row['requests_per_min']:.2f} requests/min" in out
    bench_generate(folder, *LENGTHS, "--warmup", 0)
    assert "after 0 requests of warm-up" in capsys.readouterr().out


def test_c74_two_ranks_count_tokens_once_and_c75_show_both_rates(folder, tmp_path):
    command = ["--model", folder, "--device", "cpu", *LENGTHS, "--json", tmp_path / "two.json"]
    ranks = Ranks(load_script("bench_generate").main, [command] * 2, tmp_path)
    assert ranks.exit_codes() == {0: 0, 1: 0}, (ranks.err(0), ranks.err(1))
    row = row_of(tmp_path / "two.json")
    assert (row["gpus"], row["input_tokens"], row["output_tokens"]) == (2, 100, 30)
    assert row["output_tokens_per_s_per_gpu"] == pytest.approx(row["output_tokens_per_s"] / 2)
    raw, each = row["output_tokens_per_s"], row["output_tokens_per_s_per_gpu"]
    assert f"{raw:.2f} tokens/s out on 2 CPU ranks, {each:.2f} on each" in ranks.out(0)
    assert ranks.out(1) == ""


def test_a_trace_gives_the_lengths_and_what_does_not_fit_fails(folder, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\na,5,3\nb,500,3\nc,7,4\nd,9,9\n")
    bench_generate(folder, "--trace", trace, "--requests", 3, "--ignore-eos", "--json", tmp_path / "t.json")
    row, out = row_of(tmp_path / "t.json"), capsys.readouterr().out
    assert (row["requests"], row["failed"], row["input_tokens"], row["output_tokens"]) == (3, 1, 12, 7)
    assert row["trace"] == "trace.csv"
    assert "FAILED 1: the prompt leaves no room for an answer in 128 tokens" in out  # the model's whole context


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--input-len", "0"], "--input-len must be from 1"),
        (["--requests", "-1"], "--requests must be from 1"),
        (["--warmup", "-1"], "--warmup must be 0 or more"),
        (["--max-batch", "0"], "max_batch must be at least 1"),
        (["--trace", "/nonexistent"], "/nonexistent"),
        (["--max-model-len", "999"], "context of 128"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        bench_generate(folder, *argv)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert stop.value.code != 0
    assert len(errors) == 1
    assert message in errors[0]


def test_bench_load_loads_what_it_has_written(tmp_path, capsys, monkeypatch):
    script = load_script("bench_load")
    monkeypatch.setattr(script, "R1", TINY | {"n_group": 8, "topk_group": 4})
    monkeypatch.setattr(script, "SHARD_BYTES", 50_000)
    script.main([str(tmp_path / "synthetic"), "--write", "--layers", "3", "--experts", "16"])
    checkpoint = Checkpoint(tmp_path / "synthetic")
    assert checkpoint.format == "int8"
    assert len(checkpoint.files()) > 3
    command = [tmp_path / "synthetic", "--device", "cpu", "--json", tmp_path / "load.json"]
    script.main(list(map(str, command)))
    row = row_of(tmp_path / "load.json")
    size = sum(file.stat().st_size for file in (tmp_path / "synthetic").glob("*.safetensors"))
    assert (row["bytes"], row["ranks"], row["files"]) == (size, 1, len(checkpoint.files()))
    assert row["r1_seconds"] == pytest.approx(671e9 / size * row["seconds"], rel=0.5)  # of rounded seconds
    assert "into 1 ranks" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "synthetic"), "--write"])
    assert "exists: give a new folder" in capsys.readouterr().err
