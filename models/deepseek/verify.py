"""Compare a converted checkpoint with its source."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from moe_int8.models.deepseek.checkpoint import Checkpoint, CheckpointError
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.shards import for_each_shard, planned_tensors, read_rows
from moe_int8.numerics import MIN_AMAX

CARRIED = "carried over"

# The largest right error of a weight, relative to the largest value of its row: half of a step (of 127), half of a
# bf16 value's last place. The thousandth is for fp32 rounding of the scale and of the value before it is rounded.
BOUNDS = {torch.int8: 0.5 / 127 * 1.001, torch.bfloat16: 2**-8 * 1.001}


@dataclass(frozen=True)
class Errors:
    """The tensors of one kind: how many, the largest relative error, the largest that is right, where it occurs."""

    tensors: int
    largest: float
    bound: float
    worst: str

    def __add__(self, other: "Errors") -> "Errors":
        worse = max(self, other, key=lambda errors: (errors.largest, errors.worst))  # the same in any order of shards
        return Errors(self.tensors + other.tensors, worse.largest, worse.bound, worse.worst)


def verify(folder: Path, result_folder: Path, workers: int = 1) -> dict[str, Errors]:
    """Compare the checkpoint in `result_folder` with the one in `folder` that it was made from.

    Returns:
        the errors of each kind of tensor: "q_a_proj", "experts.gate_proj", ..., and "carried over" for those that
        must be bit for bit as they were. Right is an error within its bound.

    Raises:
        CheckpointError: one of the two cannot be read, or they do not hold the same tensors.
    """
    source = Checkpoint(folder)
    try:
        result = Checkpoint(result_folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; converting again, without --verify, completes the result") from error
    if source.format == "int8" or result.format not in ("int8", "bf16"):
        raise CheckpointError(
            f"{folder} is {source.format} and {result_folder} {result.format}: "
            "give an FP8 or BF16 checkpoint, then the INT8 or BF16 one made from it"
        )
    planned = {name for file in source.files() for name in planned_tensors(source, file, result.format)}
    for name in sorted(planned.symmetric_difference(result.names())):
        has, lacks = (folder, result_folder) if name in planned else (result_folder, folder)
        raise CheckpointError(f"{name} follows from {has} and is not in {lacks}: one was not made from the other")
    errors: dict[str, Errors] = {}
    for found in for_each_shard(partial(_verify_shard, source, result), source, source.files(), workers):
        _add(errors, found)
    return dict(sorted(errors.items()))


def table(errors: dict[str, Errors]) -> str:
    """The errors as lines of text, one kind a line."""
    lines = [f"{'kind':<28}{'tensors':>9}{'largest error':>15}{'bound':>10}"]
    lines += [f"{kind:<28}{e.tensors:>9}{e.largest:>15.6f}{e.bound:>10.6f}" for kind, e in errors.items()]
    return "\n".join(lines)


def _verify_shard(source: Checkpoint, result: Checkpoint, file: str) -> dict[str, Errors]:
    errors: dict[str, Errors] = {}
    for name, (dtype, shape) in planned_tensors(source, file, result.format).items():
        if name not in source:  # the scale of an INT8 weight is read with the weight
            continue
        if (result.dtype(name), result.shape(name)) != (dtype, shape):
            raise CheckpointError(
                f"{result.folder / result.file_of(name)}: {name} is {result.dtype(name)} {list(result.shape(name))}, "
                f"expected {dtype} {list(shape)}"
            )
        kind = CARRIED if source.dtype(name) is dtype else projection_kind(name) or "to bf16"
        _add(errors, {kind: _error(source, result, name)})
    source.close()
    result.close()
    return errors


def _error(source: Checkpoint, result: Checkpoint, name: str) -> Errors:
    stored = torch.atleast_1d(result.tensor(name))
    carried = source.dtype(name) is stored.dtype
    scale = result.tensor(f"{name}_scale").float().view(-1, 1) if stored.dtype is torch.int8 else None
    largest, done = 0.0, 0
    for weight in map(torch.atleast_1d, read_rows(source, name)):
        own = slice(done, done + len(weight))
        done = own.stop
        if carried:
            largest = largest if torch.equal(weight, stored[own]) else math.inf
        else:
            value = stored[own].float()
            largest = max(largest, _relative_error(weight.float(), value if scale is None else value * scale[own]))
    return Errors(1, largest, 0.0 if carried else BOUNDS[stored.dtype], name)


def _relative_error(weight: torch.Tensor, value: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of its row; infinite if there is a NaN."""
    amax = weight.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX)
    error = ((value - weight).abs_() / amax).amax().item()
    return math.inf if math.isnan(error) else error


def _add(errors: dict[str, Errors], found: dict[str, Errors]) -> None:
    for kind, more in found.items():
        errors[kind] = errors[kind] + more if kind in errors else more
