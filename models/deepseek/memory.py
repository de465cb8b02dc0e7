"""How much memory a rank needs, known before any is taken."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_int8.models.deepseek.cache import BLOCK_SIZE, LatentCache, blocks_for
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.precision import Precision
from moe_int8.parallel import Group, Groups

GB = 1e9


def weight_bytes(config: DeepseekConfig, precision: Precision, tp_size: int) -> int:
    """Bytes of one rank's parameters: the model itself is built without memory and measured."""
    groups = Groups(tp=Group(rank=0, size=tp_size))
    return DeepseekModel(config, precision, groups, "meta").weight_bytes()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights: int
    cache: int
    cache_per_token: int
    free: int  # on the device, or on the machine for this rank, before anything is loaded

    @classmethod
    def of(
        cls,
        config: DeepseekConfig,
        precision: Precision,
        *,
        tp_size: int,
        max_batch: int,
        max_model_len: int,
        device: torch.device,
    ) -> "MemoryPlan":
        """The plan for `max_batch` sequences of up to `max_model_len` tokens."""
        per_token = LatentCache.bytes_per_token(config, precision.dtype)
        return cls(
            weights=weight_bytes(config, precision, tp_size),
            cache=max_batch * blocks_for(max_model_len) * BLOCK_SIZE * per_token,
            cache_per_token=per_token,
            free=free_bytes(device),
        )

    def __str__(self) -> str:
        line = (
            f"memory a rank: weights {self.weights / GB:.3f} GB, cache {self.cache / GB:.3f} GB "
            f"({self.cache_per_token * 1000 / 1e6:.1f} MB per 1,000 tokens)"
        )
        return f"{line}, left {(self.free - self.weights - self.cache) / GB:.3f} of {self.free / GB:.3f} GB"

    def check(self) -> None:
        """Raise ValueError if weights and cache do not fit, with what to lower."""
        if self.weights + self.cache > self.free:
            raise ValueError(f"out of memory. {self}. {WHAT_TO_LOWER}")


def free_bytes(device: torch.device) -> int:
    """Bytes that this rank can take on its device; on a CPU its share of what the kernel says is available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


WHAT_TO_LOWER = "Lower --max-batch or --max-model-len, or use more GPUs (a larger --nproc-per-node or more nodes)"


@contextmanager
def explained_out_of_memory(what_to_lower: str = WHAT_TO_LOWER) -> Iterator[None]:
    """Turn torch's many lines about a full device into a ValueError of one, with what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"out of memory: {str(error).splitlines()[0]} {what_to_lower}") from error
