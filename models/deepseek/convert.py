"""Convert official FP8 or BF16 checkpoints to INT8 with a scale per output channel, or FP8 to BF16.

Each source shard becomes one shard of the same name, written tensor by tensor, so that memory holds a few tensors and
never the model. FP8 blocks go to INT8 in fp32, with no bf16 in between, on any CPU.

Shards are written first, the index and config.json last; see output.py for what keeps a result whole.
"""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open

from moe_int8.models.deepseek.checkpoint import CONFIG, DTYPES, INDEX, Checkpoint, CheckpointError
from moe_int8.models.deepseek.formats import projection_kind
from moe_int8.models.deepseek.output import STATE, atomic, check_space, holds, open_output, write_json
from moe_int8.models.deepseek.shards import for_each_shard, planned_tensors, read_rows
from moe_int8.quantization.block_fp8 import FP8
from moe_int8.quantize import quantize_per_channel

TARGETS = ("int8", "bf16")
CONFIG_STYLES = ("compressed-tensors", "w8a8_int8")
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")  # tokenizer, generation_config, card
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Plan = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Settings:
    """What to write: `to` is one of TARGETS, `config_style` (how config.json describes INT8) one of CONFIG_STYLES."""

    to: str = "int8"
    config_style: str = "compressed-tensors"


@dataclass(frozen=True)
class Summary:
    """How many shards this run wrote and how many the result has; sizes of all shards in bytes."""

    written: int
    shards: int
    source_bytes: int
    result_bytes: int


def convert(folder: Path, out: Path, settings: Settings, workers: int = 1) -> Summary:
    """Convert the checkpoint in `folder` into the folder `out`, or continue an interrupted conversion.

    Args:
        folder: the source, FP8 in blocks, BF16 or FP32.
        out: the folder to write: new, empty, or left by an earlier run of the same conversion.
        settings: what to write.
        workers: processes, each with one shard at a time.

    Raises:
        CheckpointError: the source cannot be converted, `out` cannot take it or another conversion is writing it, or
            the disk is too small. What was finished stays, and the same call continues.
    """
    source = Checkpoint(folder)
    _check_convertible(source, settings)
    plans = {file: planned_tensors(source, file, settings.to) for file in source.files()}
    plans = {file: plan for file, plan in plans.items() if plan}  # a shard may hold nothing but scales
    copied = _files_to_copy(source)
    state = {"source": _identity(source), "settings": asdict(settings)}
    with open_output(out, source.folder, state, {*plans, *copied, CONFIG, INDEX}):
        pending = [file for file, plan in plans.items() if not _is_finished(out / file, plan)]
        source_bytes = sum(source.path(file).stat().st_size for file in source.files())
        sizes = {file: sum(_num_bytes(*tensor) for tensor in plan.values()) for file, plan in plans.items()}
        summary = Summary(len(pending), len(plans), source_bytes, sum(sizes.values()))
        weight_map = {name: file for file, plan in plans.items() for name in plan}
        index = {"metadata": {"total_size": summary.result_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        config = _result_config(source, plans, settings)
        small = all((out / name).exists() for name in copied)
        if not pending and small and holds(out / INDEX, index) and holds(out / CONFIG, config):
            return summary
        for last in (CONFIG, INDEX):  # there if shards of a finished result were deleted: it must not look complete
            (out / last).unlink(missing_ok=True)
        check_space(out, sum(sizes[file] for file in pending))

        task = partial(_convert_shard, source, out, settings.to)
        for _ in for_each_shard(task, source, pending, workers, list(plans)):
            pass
        for name in copied:
            with open(source.path(name), "rb") as original, atomic(out / name) as copy:
                shutil.copyfileobj(original, copy)
        if _identity(source) != state["source"]:
            raise CheckpointError(f"{folder} changed during the conversion: delete {out} and convert again")
        write_json(out / INDEX, index)
        write_json(out / CONFIG, config)
    return summary


def _check_convertible(source: Checkpoint, settings: Settings) -> None:
    if settings.to not in TARGETS or settings.config_style not in CONFIG_STYLES:
        raise CheckpointError(f"to must be one of {TARGETS} and config_style one of {CONFIG_STYLES}, got {settings}")
    if source.format == "int8":
        raise CheckpointError(f"{source.folder} is INT8 already: nothing to convert")
    if settings.to == "bf16" and source.format != "fp8":
        raise CheckpointError(f"{source.folder} is {source.format}: only FP8 is converted to BF16")
    for name in source.names():
        dtype, shape = source.dtype(name), source.shape(name)
        right = dtype in (FP8, torch.bfloat16, torch.float32) and len(shape) == 2 and 0 not in shape
        if projection_kind(name) and not right:
            raise CheckpointError(
                f"{source.folder / source.file_of(name)}: {name} is {dtype} {list(shape)}, "
                "expected an FP8, bfloat16 or float32 matrix"
            )


def _files_to_copy(source: Checkpoint) -> list[str]:
    """Tokenizer, generation_config, chat template, card and license; neither weights nor code."""
    return [
        source.path(path.name).name  # refuses a link that leads out
        for path in sorted(source.folder.iterdir())
        if path.is_file()
        and (path.suffix in COPIED_SUFFIXES or path.name.startswith("LICENSE"))
        and path.name not in (CONFIG, INDEX, STATE)
        and not path.name.startswith(".")
    ]


def _identity(source: Checkpoint) -> dict[str, Any]:
    """What tells this source from another, or from itself after a change, without reading the weights."""
    described = [source.path(name) for name in (CONFIG, INDEX) if source.path(name).exists()]
    files = {file: source.path(file).stat() for file in source.files()}
    return {
        "sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in described},
        "files": {file: [stat.st_size, stat.st_mtime_ns] for file, stat in files.items()},
    }


def _is_finished(path: Path, plan: Plan) -> bool:
    """Whether a shard was written: under its final name, whole, with the planned tensors."""
    try:
        with safe_open(path, framework="pt") as shard:
            stored = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
            return plan == {n: (DTYPES[s.get_dtype()], tuple(s.get_shape())) for n, s in stored.items()}
    except (OSError, SafetensorError, KeyError):
        return False


def _convert_shard(source: Checkpoint, out: Path, to: str, file: str) -> None:
    plan = planned_tensors(source, file, to)
    with atomic(out / file) as stream:
        offsets = _write_header(stream, plan)
        for name in source.names_in(file):
            if name not in plan:  # the scale of an FP8 weight is read with the weight
                continue
            stream.seek(offsets[name])
            scales = []
            for rows in read_rows(source, name):
                if plan[name][0] is torch.int8:
                    result, scale = quantize_per_channel(rows)
                    scales.append(scale)
                else:
                    result = scale = rows.to(plan[name][0])
                if scale.is_floating_point() and not scale.isfinite().all():
                    raise CheckpointError(
                        f"{source.folder / file}: {name} holds values that are not finite: download it again"
                    )
                _write_tensor(stream, result)
            if scales:
                stream.seek(offsets[f"{name}_scale"])
                _write_tensor(stream, torch.cat(scales))
            # Not needed in memory: Linux begins to write it to the disk, while the next tensor is computed.
            os.posix_fadvise(stream.fileno(), offsets[name], _num_bytes(*plan[name]), os.POSIX_FADV_DONTNEED)
    source.close()


def _write_header(stream: IO[bytes], plan: Plan) -> dict[str, int]:
    """Write a safetensors header; returns where in the file each tensor's bytes belong."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in sorted(plan, key=lambda name: (-plan[name][0].itemsize, name)):  # the widest first: all are aligned
        begins[name], end = end, end + _num_bytes(*plan[name])
        dtype, shape = plan[name]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begins[name], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


def _write_tensor(stream: IO[bytes], tensor: torch.Tensor) -> None:
    tensor = tensor.contiguous()
    if tensor.nbytes:  # by address: torch hands out bytes through numpy, which neither it nor we require
        stream.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * prod(shape)


def _result_config(source: Checkpoint, plans: Mapping[str, Plan], settings: Settings) -> dict[str, Any]:
    """The source's config.json with the quantisation of the result, and without `auto_map`: code is not copied."""
    config = {key: value for key, value in source.config.items() if key not in ("quantization_config", "auto_map")}
    if settings.to == "int8":
        kept = [name for plan in plans.values() for name, (_, shape) in plan.items() if _is_linear(name, shape)]
        config["quantization_config"] = _int8_config(
            settings.config_style, sorted(name.removesuffix(".weight") for name in kept)
        )
    return config


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer that stays as it is: lm_head, routers, eh_proj, shared_head."""
    matrix = name.endswith(".weight") and len(shape) == 2
    return matrix and not projection_kind(name) and not name.endswith("embed_tokens.weight")


def _int8_config(style: str, ignore: list[str]) -> dict[str, Any]:
    if style == "w8a8_int8":
        return {"quant_method": "w8a8_int8", "is_dynamic": True, "ignore": ignore}
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }
