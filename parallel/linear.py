"""Linear layers whose weights lie on several ranks. Each layer knows which part of a checkpoint's weight is its own.

A weight is int8 with one fp32 scale per output channel, or floating point; the layer asks a `WeightSource` for exactly
the rows and columns that it holds. Scales belong to output channels: they are cut with the rows and never with the
columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import nn

from moe_int8.dense import w8a8_linear
from moe_int8.parallel.groups import Group
from moe_int8.parallel.sharding import shard

EVERYTHING = slice(None)


class WeightSource(Protocol):
    """A weight [N, K] somewhere else, of which parts can be read."""

    shape: tuple[int, ...]

    def read_int8(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(int8 [n, k], fp32 scale [n]); the scale of a row is that of the whole row, whatever the columns."""
        ...

    def read_float(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """[n, k] in `dtype`."""
        ...


@dataclass(frozen=True)
class WeightFormat:
    """How a layer holds its weight and computes with it.

    Attributes:
        dtype: of activations, and of weights that are not int8.
        int8: the weight is int8 with a scale per output channel.
        accumulator: "int32" or "fp32", of the int8 GEMM.
    """

    dtype: torch.dtype
    int8: bool = False
    accumulator: str = "int32"


class KeepsFloat32(nn.Module):
    """A module whose parameters named in `float32` keep that dtype when a whole model is cast to another."""

    float32: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        exact = {name: getattr(self, name).data for name in self.float32}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            parameter = getattr(self, name)
            parameter.data = value.to(parameter.device)
        return self


class Linear(KeepsFloat32):
    """y = x @ W.T with the whole weight on every rank.

    Args:
        in_features, out_features: sizes of the part that this rank holds.
    """

    def __init__(self, in_features: int, out_features: int, form: WeightFormat) -> None:
        super().__init__()
        self.form = form
        dtype = torch.int8 if form.int8 else form.dtype
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        if form.int8:
            self.weight_scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)
            self.float32 = ("weight_scale",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in_features] -> [M, out_features]."""
        if self.form.int8:
            return w8a8_linear(x, self.weight, self.weight_scale, accumulator=self.form.accumulator)
        return F.linear(x, self.weight)

    def load(self, source: WeightSource) -> None:
        """Fill the weight (and scale) from a checkpoint's whole weight."""
        expect_shape(source, self.weight.shape)
        self.fill(source, EVERYTHING, EVERYTHING, EVERYTHING)

    def fill(self, source: WeightSource, rows: slice, columns: slice, into: slice) -> None:
        """Copy the source's rows and columns into this weight's rows `into`."""
        if self.form.int8:
            weight, scale = source.read_int8(rows, columns)
            self.weight_scale.data[into].copy_(scale)
        else:
            weight = source.read_float(rows, columns, self.form.dtype)
        self.weight.data[into].copy_(weight)


class ColumnParallelLinear(Linear):
    """W split along N, the output features: each rank computes its own part of y from the whole x."""

    def __init__(self, in_features: int, out_features: int, form: WeightFormat, group: Group) -> None:
        self.rows = shard(out_features, group.rank, group.size)
        self.whole = (out_features, in_features)
        super().__init__(in_features, out_features // group.size, form)

    def load(self, source: WeightSource) -> None:
        expect_shape(source, self.whole)
        self.fill(source, self.rows, EVERYTHING, EVERYTHING)


class MergedColumnParallelLinear(Linear):
    """Several column-parallel weights that share their input, computed as one; part i of every rank's output is
    that rank's share of weight i."""

    def __init__(self, in_features: int, out_features: Sequence[int], form: WeightFormat, group: Group) -> None:
        self.whole = [(n, in_features) for n in out_features]
        self.rows = [shard(n, group.rank, group.size) for n in out_features]
        sizes = [rows.stop - rows.start for rows in self.rows]
        self.into = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        super().__init__(in_features, sum(sizes), form)

    def load_part(self, part: int, source: WeightSource) -> None:
        """Fill weight number `part`."""
        expect_shape(source, self.whole[part])
        self.fill(source, self.rows[part], EVERYTHING, self.into[part])


class RowParallelLinear(Linear):
    """W split along K, the input features: returns a partial sum, which the caller adds up over the ranks.

    The activation is quantised on each rank from that rank's slice, so a different size rounds differently.
    """

    def __init__(self, in_features: int, out_features: int, form: WeightFormat, group: Group) -> None:
        self.columns = shard(in_features, group.rank, group.size)
        self.whole = (out_features, in_features)
        super().__init__(in_features // group.size, out_features, form)

    def load(self, source: WeightSource) -> None:
        expect_shape(source, self.whole)
        self.fill(source, EVERYTHING, self.columns, EVERYTHING)


def expect_shape(source: WeightSource, shape: Sequence[int]) -> None:
    """Raise ValueError unless the source has exactly this shape."""
    if tuple(source.shape) != tuple(shape):
        raise ValueError(f"the file holds shape {list(source.shape)}, the model needs {list(shape)}")
