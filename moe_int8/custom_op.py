"""Registration of the operators as `torch.ops.moe_int8.*`.

Not through `torch.library.custom_op`: its wrappers cost as much as a small kernel on every call, and the first call
imports torch's compiler, which takes seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

LIBRARY = torch.library.Library("moe_int8", "DEF")


class CustomOp(Generic[P, R]):
    """An operator that torch.compile and CUDA graphs take whole; called like the function it was made from."""

    def __init__(self, function: Callable[P, R], name: str, mutates_args: Sequence[str]) -> None:
        self._name = name
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, device)
        self._op = getattr(torch.ops.moe_int8, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._op(*args, **kwargs)
        return result

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Register what computes the shapes and dtypes of the result, without its values."""
        torch.library.register_fake(f"moe_int8::{self._name}", function, lib=LIBRARY)


def custom_op(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Make the function below an operator, on CPU and CUDA tensors.

    Args:
        name: it becomes `torch.ops.moe_int8.<name>`; the schema follows from the type hints.
        mutates_args: the arguments that it writes.
    """
    return lambda function: CustomOp(function, name, mutates_args)
