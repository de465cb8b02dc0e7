"""What is int8 in a model and what is not."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_int8.parallel import WeightFormat


@dataclass(frozen=True)
class Precision:
    """The number formats of one model.

    Attributes:
        dtype: of activations and of the weights that are not int8; bf16 or fp32.
        is_int8: whether a projection, given by its name in the checkpoint, is held as int8.
        accumulator: "int32" or "fp32", of the int8 GEMMs.
    """

    dtype: torch.dtype
    is_int8: Callable[[str], bool]
    accumulator: str = "int32"

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"activations in {str(self.dtype).removeprefix('torch.')} are not supported (DeepSeek's overflow "
                "float16); use bf16 or fp32"
            )

    def form(self, name: str) -> WeightFormat:
        """The format of the projection `name`."""
        return WeightFormat(self.dtype, self.is_int8(name), self.accumulator)
