"""How the row-wise kernels are launched: one program a row, which walks the row in blocks."""

import triton

MAX_BLOCK = 8192  # elements of a row held at a time: 16 a thread at 16 warps; one block for DeepSeek-V3's hidden size


def row_options(width: int) -> dict[str, int | bool]:
    """The launch options for rows of `width` elements.

    A row that fits one block is read once, though the kernels ask for it in every pass: the compiler merges the equal
    loads, as nothing is stored between them. Longer rows come back from the cache.
    """
    block = min(triton.next_power_of_2(width), MAX_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), "enable_fp_fusion": False}
