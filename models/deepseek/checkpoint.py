"""Checkpoint folders as Hugging Face lays them out: config.json, an index, safetensors shards.

A checkpoint is untrusted input: only safetensors are read, nothing in it is executed, and no name in it leads out of
the folder. Opening one reads and checks every shard's header, so that a missing, truncated or inconsistent file is
found before any work starts; weights are read when asked for.
"""

import re
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_int8.models.deepseek.config import ConfigError, read_config, supported_architecture
from moe_int8.models.deepseek.ignore import IgnoreList
from moe_int8.models.deepseek.untrusted import MAX_JSON_BYTES, brief, check_name, parse_json, read_json, shown
from moe_int8.quantization.block_fp8 import FP8, scale_shape

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_ELEMENTS = 2**33  # of one tensor; R1's largest, the embedding, has 0.93e9
MAX_BLOCK = 1024  # rows or columns that share an FP8 scale; the official blocks have 128

# The weights that INT8 checkpoints hold quantised; everything else (embeddings, lm_head, norms, the router
# `mlp.gate`, the MTP layer's eh_proj and shared_head) stays as it is.
_PROJECTION = re.compile(
    r"model\.layers\.\d+\.(?:"
    r"self_attn\.(?P<attention>q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
    r"|mlp\.(?:(?P<routed>experts)\.\d+\.|(?P<shared>shared_experts)\.)?(?P<mlp>gate_proj|up_proj|down_proj)"
    r")\.weight"
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": FP8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names the file and tensor and says what to do."""


def projection_kind(name: str) -> str | None:
    """What kind of quantised weight a tensor is ("q_a_proj", "experts.gate_proj", ...), or None if it is none."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return None
    return match["attention"] or f"{match['routed'] or match['shared'] or 'mlp'}.{match['mlp']}"


class Checkpoint:
    """The tensors of a checkpoint folder, by name.

    Attributes:
        folder: the folder.
        config: config.json.
        format: "fp8" (blocks), "int8" (one scale per output channel), "bf16" or "fp32": how the projections are stored.
        block: rows and columns that share a scale, for "fp8".

    Raises (on opening and on reading):
        CheckpointError: what is wrong, with the file and tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.path(CONFIG)
            self.config = read_config(self.folder)
            supported_architecture(self.config)
        except ConfigError as error:
            where = "" if str(self.folder) in str(error) else f"{self.folder}: "
            raise CheckpointError(f"{where}{error}") from error
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._read_headers()
        try:
            self._ignored = IgnoreList(self._quantization().get("ignore") or [])
        except ValueError as error:
            raise CheckpointError(f"{self.folder / CONFIG}: {error}") from error
        self.block = (0, 0)
        self.format = self._detect_format()

    def names(self) -> list[str]:
        """The names of all tensors, scales included, sorted."""
        return sorted(self._file_of)

    def files(self) -> list[str]:
        """The names of the shards, sorted."""
        return sorted(set(self._file_of.values()))

    def names_in(self, file: str) -> list[str]:
        """The names of the tensors in a shard, sorted."""
        return sorted(name for name, holder in self._file_of.items() if holder == file)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> str:
        """The shard that holds a tensor."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: no file holds the tensor {name}: the checkpoint is incomplete")
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        self.file_of(name)
        return self._stored[name][1]

    def dtype(self, name: str) -> torch.dtype:
        self.file_of(name)
        return self._stored[name][0]

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor. It may be a view of the mapped file: clone it before writing to it."""
        handle = self._handle(self.file_of(name))
        try:
            return handle.get_tensor(name)
        except SafetensorError as error:
            raise self._changed(name, error) from error

    def slice(self, name: str) -> Any:
        """A tensor to be indexed (`slice(name)[start:stop]`), of which only the indexed part is read."""
        handle = self._handle(self.file_of(name))
        try:
            return handle.get_slice(name)
        except SafetensorError as error:
            raise self._changed(name, error) from error

    def is_quantized(self, module: str) -> bool:
        """Whether a module's weight is stored quantised, with a scale."""
        return f"{module}.weight_scale" in self._stored or f"{module}.weight_scale_inv" in self._stored

    def is_ignored(self, module: str) -> bool:
        """Whether config.json lists a module as not quantised, by name or by a `re:` pattern."""
        return module in self._ignored

    def path(self, file: str) -> Path:
        """The path of one of the folder's files; refuses names and links that lead out of the folder."""
        home = self.folder.resolve()
        homes = [home]
        if home.parent.name == "snapshots":  # the Hugging Face cache: snapshots/<revision>/<file> links to blobs/<hash>
            homes.append(home.parent.parent / "blobs")
        if not file.isprintable() or Path(file).name != file:
            raise CheckpointError(f"{self.folder}: the file name {shown(file)} leaves the folder: refused")
        try:
            target = (self.folder / file).resolve()
            target.exists()
        except (OSError, RuntimeError) as error:  # a name too long for the disk, a link to itself
            raise CheckpointError(f"{self.folder}: the file {shown(file)} cannot be opened ({brief(error)})") from error
        if not any(target.is_relative_to(allowed) for allowed in homes):
            raise CheckpointError(f"{self.folder / file} links to {target}, out of the folder: refused; copy the file")
        return self.folder / file

    def close(self) -> None:
        """Let go of the mapped files; a later read maps them again."""
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": {}}  # another process maps the files itself

    def _quantization(self) -> dict[str, Any]:
        quantization = self.config.get("quantization_config") or {}
        if not isinstance(quantization, dict):
            raise CheckpointError(f"{self.folder / CONFIG}: quantization_config must be an object")
        return quantization

    def _read_headers(self) -> None:
        """Fill `_file_of` and `_stored` from the index and the shards' headers."""
        index = self._read_index()
        for file in sorted(set(index.values())) or [SINGLE]:
            self._check_header(file)
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                if index.setdefault(name, file) != file:
                    continue  # a second copy, which the index does not point to
                stored = handle.get_slice(name)
                if stored.get_dtype() not in DTYPES:
                    raise CheckpointError(
                        f"{self.folder / file}: {name} has the unsupported dtype {stored.get_dtype()}"
                    )
                shape = tuple(stored.get_shape())
                if prod(shape) > MAX_ELEMENTS:
                    raise CheckpointError(
                        f"{self.folder / file}: {name} has {prod(shape)} elements, no model's: refused"
                    )
                self._stored[name] = (DTYPES[stored.get_dtype()], shape)
        self.close()
        for name, file in index.items():
            if name not in self._stored:
                raise CheckpointError(
                    f"{self.folder / file} lacks the tensor {name} that {INDEX} promises: download both again"
                )
        self._file_of = index

    def _read_index(self) -> dict[str, str]:
        """Tensor name to shard name; empty for a single file, whose header says it all."""
        if not (self.folder / INDEX).is_file():
            if (self.folder / SINGLE).is_file():
                return {}
            if any(self.folder.glob("model*-mp*.safetensors")):
                raise CheckpointError(
                    f"{self.folder} was split for a number of ranks by DeepSeek's own convert.py: give the checkpoint "
                    "as it was published, which loading splits for any number of ranks"
                )
            if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
                raise CheckpointError(
                    f"{self.folder} holds no safetensors, only pickle files (.bin, .pt), which can run code: refused"
                )
            raise CheckpointError(
                f"{self.folder / INDEX} is missing (and there is no {SINGLE}): "
                "the download or conversion did not finish"
            )
        path = self.path(INDEX)
        try:
            index = read_json(path).get("weight_map")
        except ValueError as error:
            raise CheckpointError(f"{error}: download it again") from error
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            raise CheckpointError(f"{path}: weight_map must map tensor names to files")
        for name, file in index.items():
            try:
                check_name(name)
            except ValueError as error:
                raise CheckpointError(f"{path} {error}") from error
            if not file.endswith(".safetensors"):
                raise CheckpointError(f"{path} puts {name} into {shown(file)}: only .safetensors files are read")
        for file in sorted(set(index.values())):
            if not self.path(file).is_file():
                raise CheckpointError(f"{self.folder / file} is missing, though {INDEX} names it: download it again")
        return index

    def _check_header(self, file: str) -> None:
        """Check what safetensors does not: the header's size, before it is parsed, and its names, once each.

        Lengths, offsets and shapes are checked by safetensors when the file is opened.
        """
        path = self.path(file)
        try:
            with path.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                if size > MAX_JSON_BYTES:
                    raise ValueError(f"claims {size} bytes")
                for name in parse_json(stream.read(size)):
                    check_name(name)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file (its header {error}): download it again"
            ) from error

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            path = self.path(file)
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            except SafetensorError as error:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file ({brief(error)}): download it again"
                ) from error
        return self._handles[file]

    def _changed(self, name: str, error: SafetensorError) -> CheckpointError:
        return CheckpointError(f"{self.folder / self._file_of[name]}: {name} cannot be read ({brief(error)})")

    def _detect_format(self) -> str:
        declared = self._declared_format()
        stored = {dtype for dtype, _ in self._stored.values()}
        if torch.int8 in stored or declared == "int8":
            self._check_int8()
            return "int8"
        if FP8 in stored or declared == "fp8":
            self._check_fp8()
            return "fp8"
        kept = {name: dtype for name, (dtype, _) in self._stored.items() if projection_kind(name)}
        for name, dtype in kept.items():
            if dtype not in (torch.bfloat16, torch.float32):
                raise CheckpointError(
                    f"{self.folder / self._file_of[name]}: {name} is stored as {dtype}, which is not supported: "
                    "get a bfloat16, float32, FP8 or INT8 checkpoint"
                )
        return "bf16" if torch.bfloat16 in kept.values() else "fp32"

    def _declared_format(self) -> str | None:
        """What config.json says of the weights: "fp8", "int8" or, without a quantization_config, None."""
        quantization = self._quantization()
        if not quantization:
            return None
        method = quantization.get("quant_method")
        if method == "fp8" and quantization.get("weight_block_size"):
            return "fp8"
        if method in ("w8a8_int8", "int8") or (method == "compressed-tensors" and _is_channel_int8(quantization)):
            return "int8"
        raise CheckpointError(
            f"{self.folder / CONFIG}: the quantisation {shown(method)} (format {shown(quantization.get('format'))}) is "
            "not supported; supported are fp8 in blocks, and INT8 with a scale per channel (w8a8_int8, or "
            "compressed-tensors int-quantized with dynamic scales per token)"
        )

    def _check_int8(self) -> None:
        weights = [name for name, (dtype, _) in self._stored.items() if dtype is torch.int8]
        if not weights:
            raise CheckpointError(
                f"{self.folder / CONFIG} says INT8, but the files hold no INT8 weights and no weight_scale: "
                "remove its quantization_config, or get the INT8 files"
            )
        for name in weights:
            where = f"{self.folder / self._file_of[name]}: {name}"
            if f"{name}_scale_inv" in self._stored:
                raise CheckpointError(
                    f"{where} is INT8 in blocks (blockwise_int8), which is not supported: "
                    "convert the FP8 or BF16 checkpoint to INT8 with a scale per channel"
                )
            if f"{name}_scale" not in self._stored:
                raise CheckpointError(f"{where} is INT8 without a {name}_scale: the checkpoint is incomplete")
            shape, (dtype, scale) = self.shape(name), self._stored[f"{name}_scale"]
            right = len(shape) == 2 and scale in ((shape[0],), (shape[0], 1))
            if not right or dtype not in (torch.float32, torch.bfloat16):
                raise CheckpointError(
                    f"{where} is {list(shape)} and its scale {list(scale)} {dtype}; supported is a scale per output "
                    "channel, float32 or bfloat16 [N] or [N, 1] for a weight [N, K]"
                )
            if self.is_ignored(name.removesuffix(".weight")):
                raise CheckpointError(f"{where} is INT8, though {CONFIG} lists it under ignore: one of them is wrong")
        num_layers = self.config.get("num_hidden_layers")
        layers = range(num_layers if isinstance(num_layers, int) else 0)
        for name, (dtype, _) in self._stored.items():
            needed = projection_kind(name) and int(name.split(".")[2]) in layers  # not in the layers behind, for MTP
            if needed and dtype is not torch.int8 and not self.is_ignored(name.removesuffix(".weight")):
                raise CheckpointError(
                    f"{self.folder / self._file_of[name]}: {name} is {dtype} in an INT8 checkpoint whose {CONFIG} does "
                    "not list it under ignore: the checkpoint is incomplete, or its config.json wrong"
                )

    def _check_fp8(self) -> None:
        block = self._quantization().get("weight_block_size", [128, 128])
        if not isinstance(block, list) or [type(b) is int and 0 < b <= MAX_BLOCK for b in block] != [True, True]:
            raise CheckpointError(
                f"{self.folder / CONFIG}: weight_block_size must be two whole numbers from 1 to {MAX_BLOCK}, got "
                f"{shown(block)}"
            )
        self.block = (block[0], block[1])
        weights = [name for name, (dtype, _) in self._stored.items() if dtype is FP8]
        if not weights:
            raise CheckpointError(
                f"{self.folder / CONFIG} says fp8, but the files hold no FP8 weights: remove its quantization_config"
            )
        for name in weights:
            where = f"{self.folder / self._file_of[name]}: {name}"
            if f"{name}_scale_inv" not in self._stored:
                raise CheckpointError(f"{where} is FP8 without a {name}_scale_inv: the checkpoint is incomplete")
            dtype, scale = self._stored[f"{name}_scale_inv"]
            shape = self.shape(name)
            if dtype is not torch.float32 or len(shape) != 2 or scale != scale_shape((shape[0], shape[1]), self.block):
                raise CheckpointError(
                    f"{where} is {list(shape)} and its weight_scale_inv {dtype} {list(scale)}; "
                    f"expected one float32 scale per block of {block[0]}x{block[1]}"
                )
        for name in self._stored:
            if name.endswith("_scale_inv") and self._stored.get(name.removesuffix("_scale_inv"), (None,))[0] is not FP8:
                raise CheckpointError(
                    f"{self.folder / self._file_of[name]}: {name} is the scale of no FP8 weight: download it again"
                )


def _is_channel_int8(quantization: dict[str, Any]) -> bool:
    """Whether compressed-tensors says: INT8 weights with a scale per channel, activations quantised per token."""
    try:
        return quantization["format"] == "int-quantized" and all(
            (weights["num_bits"], weights["type"], weights["strategy"], weights["symmetric"])
            == (8, "int", "channel", True)
            and (inputs["num_bits"], inputs["type"], inputs["strategy"], inputs["dynamic"]) == (8, "int", "token", True)
            for group in quantization["config_groups"].values()
            for weights, inputs in [(group["weights"], group["input_activations"])]
        )
    except (KeyError, TypeError, AttributeError):
        return False
