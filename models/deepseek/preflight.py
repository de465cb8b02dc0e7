"""What can be known to be wrong with a checkpoint on a node before any rank starts: see moe_int8.parallel.preflight."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moe_int8.models.deepseek.cache import BLOCK_SIZE
from moe_int8.models.deepseek.checkpoint import CONFIG, INDEX
from moe_int8.models.deepseek.memory import GB, MemoryPlan
from moe_int8.models.deepseek.weights import ModelFiles, open_model
from moe_int8.parallel import check_tp_size
from moe_int8.parallel.preflight import Shared

SAME_FILES = (CONFIG, INDEX, "generation_config.json")  # what every rank reads besides the shards
TAIL = 64 << 10  # bytes of a shard that are hashed


@dataclass(frozen=True)
class FoundModel:
    """A checkpoint that can be run with the tensor-parallel size in question."""

    files: ModelFiles
    tp_size: int

    def __str__(self) -> str:
        checkpoint = self.files.checkpoint
        size = sum(checkpoint.path(file).stat().st_size for file in checkpoint.files())
        return (
            f"{checkpoint.folder}: {checkpoint.format.upper()}, {size / GB:.3f} GB in {len(checkpoint.files())} files, "
            f"TP {self.tp_size}"
        )

    def shared(self) -> Shared:
        """What tells one checkpoint from another without reading it whole.

        R1 and V3 have the same index and sizes; the last bytes of a shard are weights, and differ.
        """
        checkpoint = self.files.checkpoint
        values = {}
        for name in SAME_FILES:
            if (checkpoint.folder / name).exists():
                values[name] = hashlib.sha256(checkpoint.path(name).read_bytes()).hexdigest()[:12]
        for name in checkpoint.files():
            values[name] = _shard_mark(checkpoint.path(name))
        return Shared("checkpoint", values, f"{len(values)} files", "copy the checkpoint of one node to the others")


def find_model(folder: Path, tp_size: int) -> FoundModel:
    """The checkpoint, with every shard there and whole, in a format that runs on `tp_size` ranks."""
    files = open_model(folder)
    check_tp_size(tp_size, files.config.sharded_dimensions())
    return FoundModel(files, tp_size)


def plan_memory(model: FoundModel, kind: str, ranks: int) -> MemoryPlan:
    """The memory of a rank with one short sequence, checked on the fullest of this node's GPUs, or for a CPU's share.

    Args:
        kind: "cuda" or "cpu".
        ranks: of this node; each has a GPU, or they share the CPU's memory.
    """
    device = torch.device("cpu")
    if kind == "cuda":
        fullest = min(range(ranks), key=lambda index: torch.cuda.mem_get_info(index)[0])
        device = torch.device("cuda", fullest)
    plan = MemoryPlan.of(
        model.files.config,
        model.files.precision,
        tp_size=model.tp_size,
        max_batch=1,
        max_model_len=BLOCK_SIZE,
        device=device,
    )
    if kind == "cpu":
        plan = replace(plan, free=plan.free // ranks)  # a plan made here does not know how many there will be
    try:
        plan.check()
    except ValueError as error:
        raise ValueError(f"on {device}: {error}") from None
    return plan


def _shard_mark(path: Path) -> str:
    """Size and a hash of the end of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - TAIL, 0))
        return f"{size} bytes, {hashlib.sha256(file.read()).hexdigest()[:8]}"
