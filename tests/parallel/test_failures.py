"""One rank of scripts/generate.py fails, in every way we know of: all end, soon, and each node can read why."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from byte_tokenizer import VOCAB_SIZE, write_tokenizer
from official_layout import TINY, write_official_checkpoint
from ranks import LIMIT, ROOT, Ranks, load_script
from safetensors.torch import load_file, save_file

from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.text import load_tokenizer

CONFIG = TINY | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 16384}
HOST = socket.gethostname()
ENDLESS = ["--prompt", "ab", "--max-new-tokens", 16000, "--ignore-eos"]  # minutes of decoding

Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint, another one of the same shape, and one of which only rank 1 reads a part that is broken."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, seed in (("model", 0), ("other", 1)):
        write_official_checkpoint(root / f"{name}-fp8", CONFIG, seed=seed)
        write_tokenizer(root / f"{name}-fp8")
        convert(root / f"{name}-fp8", root / name, Settings())
    convert(root / "model-fp8", root / "broken", Settings())
    index = json.loads((root / "broken" / "model.safetensors.index.json").read_text())
    name = "model.layers.0.self_attn.q_b_proj.weight_scale"
    tensors = load_file(root / "broken" / index["weight_map"][name])
    tensors[name][-1] = torch.inf  # of the last head, which the last rank holds
    save_file(tensors, root / "broken" / index["weight_map"][name], metadata={"format": "pt"})
    load_tokenizer(root / "model")  # imported once, here, for all ranks
    return {name: root / name for name in ("model", "other", "broken")}


@pytest.fixture(scope="module")
def script():
    return load_script("generate")


@pytest.fixture
def start(script, tmp_path) -> Iterator[Start]:
    """Start ranks of generate.py with a command line each; nothing of them outlives the test."""
    started: list[Ranks] = []

    def start(*commands: Sequence[object] | None, **environment: str) -> Ranks:
        with_device = [None if command is None else [*command, "--device", "cpu"] for command in commands]
        started.append(Ranks(script.main, with_device, tmp_path, **environment))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture(scope="module")
def hanging(script, folders, tmp_path_factory) -> Iterator[Ranks]:
    """A run whose rank 1 hangs in decode, begun before the other tests, since it takes a while to be noticed."""
    command = ["--model", folders["model"], *ENDLESS, "--device", "cpu"]
    ranks = Ranks(script.main, [command, command], tmp_path_factory.mktemp("hanging"))
    ranks.wait_until(lambda: len(ranks.out(0)) > 20)
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)
    ranks.start = time.monotonic()
    yield ranks
    ranks.kill()


@pytest.fixture(autouse=True)
def _begin_the_slow_one_first(hanging) -> None:
    pass


def check_all_ended(ranks: Ranks, killed: int | None = None) -> None:
    """Every rank has ended in time, by itself and with an error, and has left nothing behind."""
    codes = ranks.exit_codes()
    assert all(code == (-signal.SIGKILL if rank == killed else 1) for rank, code in codes.items()), codes
    assert time.monotonic() - ranks.start < LIMIT
    for rank in codes:
        assert "Traceback" not in ranks.err(rank)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", ranks.port))


DIFFERENT = {
    "max batch": (
        ["--max-batch", 4],
        ["--max-batch", 8],
        "--max-batch differs: rank 0 ({host}): 4, rank 1 ({host}): 8",
    ),
    "dtype": (["--dtype", "fp32"], [], "--dtype differs: rank 0 ({host}): fp32, rank 1 ({host}): auto"),
    "prompts": (
        ["--prompt", "a"],
        ["--prompt", "b"],
        "--prompt differs: rank 0 ({host}): ['a'], rank 1 ({host}): ['b']",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_c57_different_settings_end_all_before_they_load(case, folders, start):
    *own, message = DIFFERENT[case]
    commands = [["--model", folders["model"], *(["--prompt", "a"] if case != "prompts" else []), *each] for each in own]
    ranks = start(*commands)
    check_all_ended(ranks)
    wanted = f"error: {message.format(host=HOST)}. Start every node with the same command, files and versions"
    assert [ranks.errors(rank) for rank in (0, 1)] == [[wanted], []]  # once on a node
    assert "memory a rank" not in ranks.err(0)


def test_c57_different_checkpoints_end_all_before_they_load(folders, start):
    ranks = start(*(["--model", folders[name], "--prompt", "a"] for name in ("model", "other")))
    check_all_ended(ranks)
    (error,) = ranks.errors(0)
    assert error.startswith(f"error: checkpoint's model.norm.weight differs: rank 0 ({HOST}): ")
    assert "memory a rank" not in ranks.err(0)


def test_c57_each_rank_may_see_the_checkpoint_in_a_folder_of_its_own(folders, start, tmp_path):
    (tmp_path / "here").symlink_to(folders["model"])
    commands = [
        ["--model", folder, "--prompt", "a", "--max-new-tokens", 2] for folder in (folders["model"], tmp_path / "here")
    ]
    ranks = start(*commands)
    assert ranks.exit_codes() == {0: 0, 1: 0}
    assert ranks.errors(0) == ranks.errors(1) == []


def test_c57_compare_models_compares_settings_too(folders, tmp_path):
    command = [folders["model"], folders["model"], "--device", "cpu", "--sequences", 1, "--length", 8]
    ranks = Ranks(load_script("compare_models").main, [command, [*command, "--seed", 1]], tmp_path)
    check_all_ended(ranks)
    (error,) = ranks.errors(0)
    assert f"--seed differs: rank 0 ({HOST}): 0, rank 1 ({HOST}): 1; tokens differs: " in error


def test_c56_a_rank_that_fails_in_load(folders, start):
    ranks = start(*[["--model", folders["broken"], "--prompt", "a"]] * 2)
    check_all_ended(ranks)
    (own,) = ranks.errors(1)
    assert own.startswith("error [rank 1]: ")
    assert "model.layers.0.self_attn.q_b_proj.weight_scale has values that are not finite" in own
    assert ranks.errors(0) == [own.replace("[rank 1]: ", f"[rank 0]: rank 1 ({HOST}) failed: ")]


@pytest.mark.parametrize("failing", [0, 1])
def test_c56_a_rank_that_fails_before_all_are_ready(failing, folders, start):
    good = ["--model", folders["model"], "--prompt", "a"]
    ranks = start(*(["--model", "/nonexistent", "--prompt", "a"] if rank == failing else good for rank in (0, 1)))
    check_all_ended(ranks)
    message = "/nonexistent is not a folder"
    own, others = (ranks.errors(rank) for rank in (failing, 1 - failing))
    assert len(own) == 1
    assert message in own[0]
    if failing == 1:  # rank 0 speaks for the node
        assert len(others) == 1
        assert f"rank 1 ({HOST}) failed: {message}" in others[0]


def test_c56_a_wrong_command_line_on_one_rank(folders, start):
    good = ["--model", folders["model"], "--prompt", "a"]
    ranks = start(good, [*good, "--nonsense"])
    assert ranks.exit_codes() == {0: 1, 1: 2}
    assert ranks.errors(0)[0].startswith(f"error: rank 1 ({HOST}) failed: unrecognized arguments: --nonsense")


def test_c56_a_bug_shows_its_traceback_on_its_own_rank_only(folders, start, monkeypatch):
    def generate(self: Generator, *args: object, **kwargs: object) -> None:
        assert os.environ["RANK"] == "0", "a bug"
        dist.barrier()

    monkeypatch.setattr(Generator, "generate", generate)
    ranks = start(*[["--model", folders["model"], "--prompt", "a"]] * 2)
    assert ranks.exit_codes() == {0: 1, 1: 1}
    assert "Traceback" in ranks.err(1)
    assert "Traceback" not in ranks.err(0)
    assert ranks.errors(0) == [f"error [rank 0]: rank 1 ({HOST}) failed: AssertionError: a bug"]


@pytest.mark.parametrize("killed", [0, 1])
def test_c56_a_rank_that_is_killed_in_decode(killed, folders, start, tmp_path):
    answers = tmp_path / "answers.json"
    ranks = start(*[["--model", folders["model"], *ENDLESS, "--json", answers]] * 2)
    ranks.wait_until(lambda: len(ranks.out(0)) > 20)
    ranks.processes[killed].kill()
    check_all_ended(ranks, killed=killed)
    assert ranks.errors(1 - killed) == [
        f"error [rank {1 - killed}]: rank {killed} ({HOST}) ended without a word: "
        "it was killed or crashed; its screen and dmesg may say why"
    ]
    assert not answers.exists()


def test_c56_the_cause_is_named_and_not_the_collective_that_needed_the_rank(folders, start, monkeypatch):
    def generate(self: Generator, *args: object, **kwargs: object) -> None:
        if os.environ["RANK"] == "0":
            raise RuntimeError("Connection closed by peer")  # as gloo has it, perhaps before the watch
        time.sleep(0.5)
        raise ValueError("the cause")

    monkeypatch.setattr(Generator, "generate", generate)
    ranks = start(*[["--model", folders["model"], "--prompt", "a"]] * 2)
    check_all_ended(ranks)
    assert ranks.errors(1) == ["error [rank 1]: the cause"]
    assert ranks.errors(0) == [f"error [rank 0]: rank 1 ({HOST}) failed: the cause"]


def test_c56_an_interrupted_rank_ends_all(folders, start):
    ranks = start(*[["--model", folders["model"], *ENDLESS]] * 2)
    ranks.wait_until(lambda: len(ranks.out(0)) > 20)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    assert ranks.exit_codes() == {0: 130, 1: 1}
    assert "Traceback" not in ranks.err(0) + ranks.err(1)
    assert ranks.err(0).endswith("interrupted\n")
    assert ranks.errors(1) == [f"error [rank 1]: rank 0 ({HOST}) failed: interrupted"]


def test_c56_a_collective_that_fails_by_itself_is_one_line(folders, start, monkeypatch):
    def generate(self: Generator, *args: object, **kwargs: object) -> None:
        if os.environ["RANK"] == "0":
            dist.barrier()
        time.sleep(LIMIT)  # well, and busy with something else

    monkeypatch.setattr(Generator, "generate", generate)
    ranks = start(*[["--model", folders["model"], "--prompt", "a", "--timeout", 2]] * 2)
    check_all_ended(ranks)
    (own,), (other,) = ranks.errors(0), ranks.errors(1)
    assert own.startswith("error [rank 0]: the ranks have lost each other, one is stuck or the network is down: ")
    assert other == own.replace("[rank 0]: ", f"[rank 1]: rank 0 ({HOST}) failed: ")


def test_a_user_of_a_chat_may_think_for_longer_than_a_collective_waits(folders, start, monkeypatch):
    lines = iter(["hello", ""])

    def read_line(_: str) -> str:
        time.sleep(2)
        return next(lines)

    monkeypatch.setattr("builtins.input", read_line)
    ranks = start(*[["--model", folders["model"], "--chat", "--max-new-tokens", 4, "--timeout", 1]] * 2)
    assert ranks.exit_codes() == {0: 0, 1: 0}
    assert ranks.out(0).count("[cut: length]") == 1


def test_c60_ranks_that_cannot_connect(folders, start, monkeypatch):
    original = dist.init_process_group

    def init_process_group(**options: object) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(LIMIT)  # as if its packets were lost
        original(**options)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    ranks = start(*[["--model", folders["model"], "--prompt", "a", "--join-timeout", 3]] * 2)
    check_all_ended(ranks)
    for rank in (0, 1):
        assert "gloo has not connected the ranks within 3 s; check that" in ranks.errors(rank)[0]
        assert "GLOO_SOCKET_IFNAME (lo)" in ranks.errors(rank)[0]


@pytest.mark.parametrize("present", [0, 1])
def test_c60_a_missing_peer(present, folders, start):
    command = ["--model", folders["model"], "--prompt", "a", "--join-timeout", 2]
    ranks = start(*(command if rank == present else None for rank in (0, 1)))
    check_all_ended(ranks)
    assert 2 <= time.monotonic() - ranks.start < LIMIT / 3
    (error,) = ranks.errors(present)
    who = ("rank 1 of 2 did not come to", "rank 1 of 2 did not meet the others at")[present]
    assert error.startswith(f"error: {who} 127.0.0.1:{ranks.port} within 2 s")
    for word in ("--node-rank", "--master-addr", "GLOO_SOCKET_IFNAME (lo)", "NCCL_SOCKET_IFNAME (not set)"):
        assert word in error


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_c60_a_loopback_master_of_several_nodes_is_refused(address, folders, start):
    command = ["--model", folders["model"], "--prompt", "a"]
    ranks = start(command, command, GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR=address)
    check_all_ended(ranks)
    for rank in (0, 1):
        assert ranks.errors(rank) == [
            f"error: the master address {address} is each of the 2 nodes itself; give all of them --master-addr with "
            "an address of node 0 that the others reach"
        ]


def test_c56_under_torchrun_a_killed_rank_ends_all(folders):
    command = ["--standalone", "--nproc-per-node", "2", ROOT / "scripts" / "generate.py"]
    command += ["--model", folders["model"], *ENDLESS, "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
    ) as torchrun:
        try:
            assert torchrun.stdout.read(20)  # it decodes
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
            by_rank = {rank_of(int(child)): int(child) for child in children}
            start = time.monotonic()
            os.kill(by_rank["1"], signal.SIGKILL)
            _, err = torchrun.communicate(timeout=LIMIT)
        finally:
            torchrun.kill()
    assert torchrun.returncode == 1
    assert time.monotonic() - start < LIMIT
    assert f"error [rank 0]: rank 1 ({HOST}) ended without a word" in err
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def rank_of(pid: int) -> str:
    """RANK in the environment of a process; empty if it has none."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((value[5:].decode() for value in variables if value.startswith(b"RANK=")), "")


def test_c56_a_rank_that_hangs_in_decode(hanging):  # the last, so that its time has come
    deadline = hanging.start + LIMIT
    hanging.processes[0].join(deadline - time.monotonic())
    assert hanging.processes[0].exitcode == 1
    assert hanging.errors(0) == [f"error [rank 0]: no answer for 20 s from rank 1 ({HOST}): hangs, or is cut off"]
    os.kill(hanging.processes[1].pid, signal.SIGCONT)  # when it goes on, it ends too
    hanging.processes[1].join(10)
    assert hanging.processes[1].exitcode == 1
    assert "Traceback" not in hanging.err(1)
