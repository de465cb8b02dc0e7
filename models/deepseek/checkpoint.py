"""Checkpoint folders as Hugging Face lays them out: config.json, an index, safetensors shards.

A checkpoint is untrusted input: only safetensors are read, nothing in it is executed, and no name in it leads out of
the folder. Opening one reads and checks every shard's header, so that a missing, truncated or inconsistent file is
found before any work starts; weights are read when asked for.
"""

from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moe_int8.models.deepseek.config import read_config, supported_architecture
from moe_int8.models.deepseek.formats import (
    check_fp8,
    check_int8,
    declared_format,
    fp8_block,
    named_format,
    stored_format,
)
from moe_int8.models.deepseek.ignore import IgnoreList
from moe_int8.models.deepseek.untrusted import MAX_JSON_BYTES, brief, check_name, parse_json, read_json, shown
from moe_int8.quantization.block_fp8 import FP8

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_ELEMENTS = 2**33  # of one tensor; R1's largest, the embedding, has 0.93e9

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


class Index:
    """What a checkpoint folder says without its shards: config.json, and which file should hold which tensor.

    Attributes:
        folder: the folder.
        config: config.json.
        declared: "fp8", "int8" or None: what its quantization_config says.

    Raises:
        CheckpointError: what is wrong, with the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path(CONFIG)
        try:
            self.config = read_config(self.folder)
            supported_architecture(self.config)
            self._quantization = self.config.get("quantization_config") or {}
            if not isinstance(self._quantization, dict):
                raise ValueError("quantization_config must be an object")
            self.declared = declared_format(self._quantization)
            self._ignored = IgnoreList(self._quantization.get("ignore") or [])
        except ValueError as error:
            raise CheckpointError(self._with_file(error)) from error
        self._file_of = self._read_index()

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

    def is_quantized(self, module: str) -> bool:
        """Whether a module's weight is stored quantised, with a scale."""
        return f"{module}.weight_scale" in self or f"{module}.weight_scale_inv" in self

    def is_ignored(self, module: str) -> bool:
        """Whether config.json lists a module as not quantised, by name or by a `re:` pattern."""
        return module in self._ignored

    def has_shards(self) -> bool:
        """Whether any of the files is there."""
        return any(self.path(file).is_file() for file in self.files() or [SINGLE])

    def named_format(self) -> str:
        """The format that config.json and the tensors' names tell: "fp8", "int8" or "bf16" (which may be fp32)."""
        try:
            return named_format(self._file_of, self.declared)
        except ValueError as error:
            raise CheckpointError(self._with_file(error)) from error

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
        for file in set(index.values()):
            self.path(file)
        return index

    def _where(self, name: str) -> str:
        return f"{self.folder / self._file_of[name]}: {name}"

    def _with_file(self, error: ValueError) -> str:
        """A message that is about config.json unless it names another file."""
        text = str(error)
        if str(self.folder) in text:
            return text
        return str(self.folder / text) if text.startswith(CONFIG) else f"{self.folder / CONFIG}: {text}"


class Checkpoint(Index):
    """The tensors of a checkpoint folder, by name.

    Attributes:
        format: "fp8" (blocks), "int8" (one scale per output channel), "bf16" or "fp32": how the projections are stored.
        block: rows and columns that share a scale, for "fp8".

    Raises (on opening and on reading):
        CheckpointError: what is wrong, with the file and tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._handles: dict[str, Any] = {}
        self._stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._read_headers()
        self.block = (0, 0)
        num_layers = self.config.get("num_hidden_layers")
        try:
            self.format = stored_format(self._stored, self.declared, self._where)
            if self.format == "int8":
                check_int8(self._stored, self._where, self.is_ignored, num_layers if isinstance(num_layers, int) else 0)
            elif self.format == "fp8":
                self.block = fp8_block(self._quantization)
                check_fp8(self._stored, self._where, self.block)
        except ValueError as error:
            raise CheckpointError(self._with_file(error)) from error

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

    def close(self) -> None:
        """Let go of the mapped files; a later read maps them again."""
        self._handles.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": {}}  # another process maps the files itself

    def _read_headers(self) -> None:
        """Fill `_stored` from the shards' headers, and `_file_of` with what the index forgot."""
        index = self._file_of
        for file in self.files():
            if not self.path(file).is_file():
                raise CheckpointError(f"{self.folder / file} is missing, though {INDEX} names it: download it again")
        for file in self.files() or [SINGLE]:
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
