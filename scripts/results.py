"""Measured figures as files: benchmarks/results/<what>_<card>.json, from which tables and pictures are made."""

import datetime
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def write_results(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write measured rows with what they were measured on.

    The commit is git's, or MOE_INT8_COMMIT where the code runs outside its repository.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "commit": os.environ.get("MOE_INT8_COMMIT") or _git_commit(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=2)[:-2]
    path.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n', encoding="utf-8")


def _git_commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or "unknown"
