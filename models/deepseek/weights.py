"""Load a checkpoint into a model: each rank reads the slices it holds, and nothing else.

`weight_table` is the one place that knows which tensor of the files goes where.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from moe_int8.check import check_accumulator
from moe_int8.models.deepseek.checkpoint import Checkpoint, CheckpointError
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.layout import check_fits
from moe_int8.models.deepseek.model import DecoderLayer, DeepseekModel
from moe_int8.models.deepseek.moe import GATE, MLP, UP, MoE
from moe_int8.models.deepseek.norm import RMSNorm
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.parallel import Groups, Linear, WeightSource
from moe_int8.parallel.linear import EVERYTHING
from moe_int8.quantize import dequantize, quantize_per_channel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALE = "_scale"  # X.weight is int8 if the files also hold X.weight_scale

SINGLE = Groups()

LOAD_THREADS = 16  # a disk, and more so a network's, is fast only when asked for several things at a time

Load = Callable[[WeightSource], None]


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint that was opened and found to fit: what is needed to size the model and to load it.

    Attributes:
        precision: the formats in which it will be held.
        quantize: its floating-point projections become int8 while loading.
        unused: how many of its tensors belong to multi-token prediction.
    """

    config: DeepseekConfig
    checkpoint: Checkpoint
    precision: Precision
    quantize: bool
    unused: int


def open_model(
    folder: Path | str,
    *,
    dtype: str = "auto",
    activation_dtype: torch.dtype = torch.bfloat16,
    accumulator: str = "int32",
) -> ModelFiles:
    """Read and check everything about the model in `folder` but its weights.

    Args:
        dtype: "int8"; "bf16" or "fp32": weights in that format, an INT8 checkpoint is dequantised; "auto": what the
            checkpoint holds. "int8" on a BF16 or FP32 checkpoint quantises while loading.
        activation_dtype: with int8 weights, of everything that is not int8.
        accumulator: "int32" or "fp32", of the int8 GEMMs.

    Raises:
        ConfigError: config.json is missing or describes no supported model.
        CheckpointError: the files are incomplete, broken, of a format that is not run, or do not hold the model that
            config.json describes; names the file and the tensor.
        ValueError: an argument is unknown.
    """
    if dtype not in ("auto", "int8", *DTYPES):
        raise ValueError(f"dtype must be auto, int8, bf16 or fp32, got {dtype!r}")
    check_accumulator(accumulator)
    config = DeepseekConfig.from_folder(folder)
    checkpoint = Checkpoint(folder)
    if checkpoint.format == "fp8":
        raise CheckpointError(
            f"{folder} is an FP8 checkpoint, which cannot be run as it is; convert it first: "
            f"python scripts/convert.py {folder} {str(folder).rstrip('/')}-INT8"
        )
    unused = check_fits(checkpoint, config)
    if dtype == "auto":
        dtype = checkpoint.format
    quantize = dtype == "int8" and checkpoint.format != "int8"
    precision = Precision(
        dtype=DTYPES.get(dtype, activation_dtype),
        is_int8=lambda name: dtype == "int8" and (quantize or checkpoint.is_quantized(name)),
        accumulator=accumulator,
    )
    return ModelFiles(config, checkpoint, precision, quantize, unused)


def load_model(
    files: ModelFiles | Path | str,
    groups: Groups = SINGLE,
    *,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
    **options: Any,
) -> DeepseekModel:
    """Build this rank's share of a model.

    Args:
        files: from `open_model`, or a folder to open with `options`.
        say: takes the lines that a user should see; give it to one rank.

    Raises:
        CheckpointError: a tensor cannot be read or holds values that are not finite; names the file and the tensor.
        ValueError: the model does not split over the ranks. With a folder, also what `open_model` raises.
    """
    if not isinstance(files, ModelFiles):
        files = open_model(files, **options)
    if files.quantize:
        say(f"quantising the {files.checkpoint.format} weights of {files.checkpoint.folder} to int8 while loading")
    if files.unused:
        say(f"skipping layer {files.config.num_hidden_layers} (multi-token prediction): {files.unused} tensors")
    model = DeepseekModel(files.config, files.precision, groups, device)
    load_weights(model, files.checkpoint, quantize=files.quantize, progress=groups.tp.rank == 0)
    return model


def load_weights(model: DeepseekModel, checkpoint: Checkpoint, *, quantize: bool, progress: bool) -> None:
    """Fill every parameter of `model`; see `load_model`.

    All ranks go through the files in one order, so that what several of a node need is read from the disk once and
    comes to the others from the page cache; LOAD_THREADS tensors at a time.
    """
    table = weight_table(model)
    by_file: dict[str, list[str]] = {file: [] for file in checkpoint.files()}
    for name in sorted(table):
        by_file[checkpoint.file_of(name)].append(name)

    broken = threading.Event()

    def load(name: str) -> None:
        if broken.is_set():
            return
        try:
            table[name](CheckpointWeight(checkpoint, name, quantize))
        except Exception as error:
            broken.set()
            if not isinstance(error, ValueError):
                raise
            raise CheckpointError(f"{checkpoint.file_of(name)}: {name}: {error}") from error

    sizes = {name: prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize for name in table}
    with (
        progress_bar(
            total=sum(sizes.values()), desc="load", unit="B", unit_scale=True, disable=not progress, leave=False
        ) as bar,
        ThreadPoolExecutor(LOAD_THREADS) as pool,
    ):
        for names in by_file.values():
            for name, _ in zip(names, pool.map(load, names), strict=True):
                bar.update(sizes[name])
            checkpoint.close()  # kept mapped, R1's files would take 1.3 GB of page tables in each process


def weight_table(model: DeepseekModel) -> dict[str, Load]:
    """Every tensor that the model needs, by its name in the files, and what takes it (scales come with weights)."""
    table: dict[str, Load] = {
        "model.embed_tokens.weight": model.embed_tokens.load,
        "model.norm.weight": model.norm.load,
        "lm_head.weight": model.lm_head.load,
    }
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{index}"
        table[f"{prefix}.input_layernorm.weight"] = layer.input_layernorm.load
        table[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.load
        for name, module in layer.self_attn.named_children():  # the modules carry the files' names
            assert isinstance(module, Linear | RMSNorm)
            table[f"{prefix}.self_attn.{name}.weight"] = module.load
        if isinstance(layer.mlp, MoE):
            table |= moe_table(f"{prefix}.mlp", layer.mlp)
        else:
            table |= mlp_table(f"{prefix}.mlp", layer.mlp)
    return table


def mlp_table(prefix: str, mlp: MLP) -> dict[str, Load]:
    """The part of `weight_table` for one dense MLP or shared expert."""
    return {
        f"{prefix}.gate_proj.weight": partial(mlp.gate_up_proj.load_part, GATE),
        f"{prefix}.up_proj.weight": partial(mlp.gate_up_proj.load_part, UP),
        f"{prefix}.down_proj.weight": mlp.down_proj.load,
    }


def moe_table(prefix: str, moe: MoE) -> dict[str, Load]:
    """The part of `weight_table` for one MoE layer."""
    table: dict[str, Load] = {f"{prefix}.gate.weight": moe.gate.load}
    if moe.gate.e_score_correction_bias is not None:
        table[f"{prefix}.gate.e_score_correction_bias"] = moe.gate.load_bias
    for expert in range(moe.experts.w13.shape[0]):
        name = f"{prefix}.experts.{expert}"
        table[f"{name}.gate_proj.weight"] = partial(moe.experts.load_gate_up, expert, GATE)
        table[f"{name}.up_proj.weight"] = partial(moe.experts.load_gate_up, expert, UP)
        table[f"{name}.down_proj.weight"] = partial(moe.experts.load_down, expert)
    if moe.shared_experts is not None:
        table |= mlp_table(f"{prefix}.shared_experts", moe.shared_experts)
    return table


class CheckpointWeight:
    """A `WeightSource` on the files: one tensor, and its scale if it is int8.

    Args:
        quantize: a floating-point tensor may be read as int8.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, quantize: bool) -> None:
        self.checkpoint = checkpoint
        self.name = name
        self.quantize = quantize
        self.shape = tuple(checkpoint.shape(name))
        self.is_int8 = checkpoint.dtype(name) == torch.int8

    def read_int8(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_int8:
            return self._codes_and_scale(rows, columns)
        if not self.quantize:
            raise ValueError("int8 with a weight_scale is needed, the file holds it unquantised")
        # A row's scale is that of the whole row, so the columns are cut after quantising.
        q, scale = quantize_per_channel(self.checkpoint.slice(self.name)[rows])
        if not scale.isfinite().all():
            raise ValueError("the weight has values that are not finite")
        return q[:, columns], scale.flatten()

    def read_float(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        if self.is_int8:
            return dequantize(*self._codes_and_scale(rows, columns), dtype)
        part = self.checkpoint.slice(self.name)
        return (part[rows] if len(self.shape) == 1 or columns == EVERYTHING else part[rows, columns]).to(dtype)

    def _codes_and_scale(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        name = self.name + SCALE
        if tuple(self.checkpoint.shape(name)) not in ((self.shape[0],), (self.shape[0], 1)):
            raise ValueError(f"{name} has shape {list(self.checkpoint.shape(name))}, one value a row is needed")
        codes = self.checkpoint.slice(self.name)[rows, columns]
        scale = self.checkpoint.slice(name)[rows].float().flatten()
        if not scale.isfinite().all():
            raise ValueError(f"{name} has values that are not finite")
        if (scale < 0).any():
            raise ValueError(f"{name} has negative values")
        # Converters without a lower bound write 0 for a row of zeros; on any other row it is lost data.
        if codes[scale == 0].any():
            raise ValueError(f"{name} is 0 for a row whose codes are not")
        return codes, scale
