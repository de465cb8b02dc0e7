"""Argument checks of the public operators: one sentence that names the argument and what it got."""

from collections.abc import Sequence

import torch

from moe_int8.numerics import ACCUMULATORS

Shape = Sequence[int | str]  # an int is required, a name ("M") stands for any size


def check_tensor(
    name: str,
    x: torch.Tensor,
    shape: Shape,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
    contiguous_rows: bool = True,
) -> None:
    """Check one argument.

    Args:
        name: the argument's name, for the message.
        shape: required sizes; a string stands for any size and names it in the message.
        dtype: the allowed dtype or dtypes.
        device: the device that the other arguments are on, or None to accept any.
        contiguous_rows: the last dimension must have stride 1 (other strides are free).

    Raises:
        ValueError: the argument differs, with everything it should be and is.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    sizes = zip(shape, x.shape, strict=False)  # of different lengths only where the next line ends at once
    fits = x.ndim == len(shape) and all(isinstance(want, str) or want == got for want, got in sizes)
    rows = not contiguous_rows or x.ndim == 0 or x.shape[-1] <= 1 or x.numel() == 0 or x.stride(-1) == 1
    if fits and x.dtype in dtypes and rows and (device is None or x.device == device):
        return
    wanted = f"{' or '.join(_short(d) for d in dtypes)} [{', '.join(map(str, shape))}]"
    wanted += " with contiguous rows" if contiguous_rows else ""
    wanted += f" on {device}" if device is not None else ""
    raise ValueError(
        f"{name} must be {wanted}, got {_short(x.dtype)} {list(x.shape)}, strides {x.stride()}, on {x.device}"
    )


def check_accumulator(accumulator: str) -> None:
    """Raise ValueError unless `accumulator` is one that the GEMMs know."""
    if accumulator not in ACCUMULATORS:
        raise ValueError(f"accumulator must be one of {', '.join(ACCUMULATORS)}, got {accumulator!r}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
