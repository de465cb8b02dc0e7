"""scripts/preflight.py as a user meets it, on one node; several nodes are in tests/parallel/test_two_nodes.py."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from official_layout import TINY, write_official_checkpoint
from ranks import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "bf16"
    write_official_checkpoint(folder, TINY, fp8=False)
    return folder


@pytest.fixture(scope="module")
def script():
    return load_script("preflight")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def status_of(script, *argv: object) -> int:
    try:
        script.main([*map(str, argv), "--device", "cpu"])
    except SystemExit as stop:
        return stop.code
    return 0


def test_all_is_well(script, model, port, capsys, tmp_path):
    argv = ["--nproc-per-node", 2, "--model", model, "--master-port", port, "--json", tmp_path / "checks.json"]
    assert status_of(script, *argv) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert last == "preflight: ok on node 0"
    assert not err
    checks = json.loads((tmp_path / "checks.json").read_text())
    names = ["node rank", "master address", "model", "memory", "port", "settings", "versions", "checkpoint"]
    assert [check["name"] for check in checks] == names
    assert lines == [f"ok      {check['name']}: {check['text']}" for check in checks]


def test_every_failure_is_said_and_the_exit_status_is_1(script, port, capsys, tmp_path):
    with socket.create_server(("", port)):
        assert status_of(script, "--model", tmp_path / "none", "--master-port", port, "--json", tmp_path / "j") == 1
    out, err = capsys.readouterr()
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert failed[0] == f"FAILED  model: {tmp_path / 'none'} is not a folder; give the folder of a DeepSeek checkpoint"
    assert failed[1].startswith(f"FAILED  port: port {port} cannot be used on this node")
    assert err == "error: 2 of 4 checks failed: model, port\n"
    assert [check["name"] for check in json.loads((tmp_path / "j").read_text()) if not check["ok"]] == ["model", "port"]


def test_c60_several_nodes_on_loopback_end_at_once(script, model, port, capsys):
    argv = ["--nnodes", 2, "--node-rank", 1, "--model", model, "--master-port", port]
    assert status_of(script, *argv) == 1
    out, err = capsys.readouterr()
    assert "FAILED  master address: --master-addr 127.0.0.1 is another machine on every node" in out
    assert err == "error: 1 of 4 checks failed: master address\n"


def test_then_torchrun_starts_the_script(script, model, port, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda file, words: started.append((file, words)))
    argv = ["--nproc-per-node", 2, "--model", model, "--master-port", port, "--timeout", 30, "--device", "cpu"]
    script.main([*map(str, argv), "--", "scripts/generate.py", "--model", "x", "--prompt", "a b"])
    out, err = capsys.readouterr()
    assert not out  # the script's answers alone go there
    assert err.endswith("preflight: ok on node 0\n")
    ((file, words),) = started
    assert file == words[0] == sys.executable
    assert words[1:] == [
        *["-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "2"],
        *["--master-addr", "127.0.0.1", "--master-port", str(port), "--rdzv-conf", "timeout=30"],
        *["scripts/generate.py", "--model", "x", "--prompt", "a b"],
    ]


def test_torchrun_does_not_start_after_a_failure(script, tmp_path, port, capsys, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started"))
    argv = ["--model", tmp_path / "none", "--master-port", port, "--device", "cpu", "--", "scripts/generate.py"]
    with pytest.raises(SystemExit):
        script.main([*map(str, argv)])


def test_it_is_not_run_by_torchrun(script, model, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert status_of(script, "--model", model) == 2
    assert "it starts torchrun itself: run it with python, once on each node" in capsys.readouterr().err
