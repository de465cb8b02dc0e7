"""The example is run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_the_example_runs_and_its_output_has_the_size_of_its_input():
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120, check=True)
    found = re.fullmatch(r"\[4, 256\] torch.bfloat16, root mean square (\S+)\n", run.stdout)
    assert found, run.stdout
    # x has size 1, proj (weights of size 1/16, 256 of them) keeps it, and what two experts of weight 1/2 add is
    # small: 1 * silu(1) * 11 / 16 at most
    assert 0.7 < float(found[1]) < 1.7
