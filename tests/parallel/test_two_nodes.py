"""The README's commands for two nodes, on two emulated ones (tests/two_nodes.sh), against one rank."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import VOCAB_SIZE, write_tokenizer
from ranks import load_script
from tiny import PLAIN_ROPE, V3, make_reference, save

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "two_nodes.sh"
MODEL = "DeepSeek-R1-INT8"  # the README's; here it is tiny and fp32, so that the number of ranks changes no token
SIZES = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "max_position_embeddings": 80, "rope_parameters": PLAIN_ROPE}


def readme_command(program: str) -> str:
    """The README's lines for node 0 of two that start with `program` (or set what it needs)."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if "--nnodes 2" in block and re.search(rf"^{program} ", block, re.MULTILINE)]
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in which the README's paths are right."""
    folder = tmp_path_factory.mktemp("two_nodes")
    save(make_reference(V3 | SIZES), folder / MODEL)
    write_tokenizer(folder / MODEL)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


def run_nodes(home: Path, commands: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on each node; node 0's stdout goes to answer0, its stderr to node0.log, and so on."""
    commands = [f"{{ {command}\n}} >answer{node}" for node, command in enumerate(commands)]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # python and torchrun
        "LIMIT": "100",
    }
    run = subprocess.run(
        ["bash", SCRIPT, "--run", *commands], cwd=home, env=environment, capture_output=True, text=True, timeout=120
    )
    if run.returncode == 77:
        pytest.skip(run.stderr.strip().removeprefix("skipped: "))
    return run


def one_rank(home: Path, command: str, capsys, monkeypatch) -> str:
    """What the command's script answers on one rank, in this process."""
    monkeypatch.chdir(home)
    load_script("generate").main([*shlex.split(command.split("scripts/generate.py")[1]), "--device", "cpu"])
    return capsys.readouterr().out


@pytest.mark.parametrize("program, ranks", [("python scripts/preflight.py", 2), ("torchrun", 1)])
def test_c82_the_readmes_commands_work_as_written(program, ranks, home, capsys, monkeypatch):
    """But for the number of ranks on a node: 8 are too many for the machine that tests."""
    written = readme_command(program)
    command = written.replace("--nproc-per-node 8", f"--nproc-per-node {ranks}")
    assert command != written
    run = run_nodes(home, [command, command.replace("--node-rank 0", "--node-rank 1")])
    logs = "".join((home / f"node{node}.log").read_text() for node in range(2))
    assert run.returncode == 0, run.stderr + logs
    answer = (home / "answer0").read_text()
    assert len(answer) > 20
    assert answer == one_rank(home, command, capsys, monkeypatch)
    assert (home / "answer1").read_text() == ""
    if "preflight" in program:
        for line in (
            "interface: eth0 (10.0.0.2)",
            "connections: every other node can be reached",
            "other nodes: passed",
        ):
            assert f"ok      {line}" in (home / "node1.log").read_text()


def test_c82_the_readme_says_that_every_node_has_its_own_command():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Every node gets its own command" in readme
    assert "`--node-rank 1`" in readme


def test_c60_a_node_without_interface_and_with_another_checkpoint(home):
    """Both nodes end, each with what to do, long before the timeout."""
    other = home / "other"
    other.mkdir()
    for file in (home / MODEL).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "generation_config.json").write_text("{}")
    common = "python scripts/preflight.py --nnodes 2 --master-addr 10.0.0.1 --device cpu"
    run = run_nodes(
        home,
        [
            f"GLOO_SOCKET_IFNAME=eth0 {common} --node-rank 0 --model {MODEL}",
            f"{common} --node-rank 1 --model other",
        ],
    )
    assert run.returncode == 1
    first, second = ((home / f"answer{node}").read_text() for node in range(2))
    assert "FAILED  interface: GLOO_SOCKET_IFNAME is not set: export GLOO_SOCKET_IFNAME=eth0" in second
    assert "ok      connections" not in second
    for lines in (first, second):
        assert "FAILED  checkpoint: generation_config.json is" in lines
    assert "FAILED  other nodes: node 1 failed (interface, checkpoint): see its screen" in first


def test_without_root_it_is_skipped_with_the_reason():
    if os.geteuid() != 0:
        pytest.skip("only root can run it as somebody else")
    run = subprocess.run(["bash", "-s"], input=SCRIPT.read_text(), user=65534, capture_output=True, text=True)
    assert run.returncode == 77
    assert run.stderr == "skipped: needs root, to make network namespaces\n"
