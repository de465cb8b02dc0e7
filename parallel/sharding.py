"""What a tensor-parallel size may be, and which slice of a dimension a rank holds: decided here and nowhere else."""

from collections.abc import Mapping

MAX_TP_SIZE = 32  # two nodes of 16 or four of 8; beyond it nothing has been tried


def check_tp_size(tp_size: int, dimensions: Mapping[str, int]) -> None:
    """Check that every sharded dimension splits evenly over `tp_size` ranks.

    Args:
        dimensions: the dimensions that the model shards, by the name that config.json gives them.

    Raises:
        ValueError: names the first dimension that does not divide, or the largest supported size.
    """
    if not 1 <= tp_size <= MAX_TP_SIZE:
        raise ValueError(f"tensor-parallel size {tp_size} is not supported: the largest is {MAX_TP_SIZE}")
    for name, size in dimensions.items():
        if size % tp_size:
            legal = ", ".join(map(str, legal_tp_sizes(dimensions)))
            raise ValueError(f"tensor-parallel size {tp_size} does not divide {name} = {size}; use one of {legal}")


def legal_tp_sizes(dimensions: Mapping[str, int]) -> list[int]:
    """The tensor-parallel sizes that `check_tp_size` accepts, ascending."""
    return [tp for tp in range(1, MAX_TP_SIZE + 1) if all(size % tp == 0 for size in dimensions.values())]


def shard(size: int, rank: int, world: int) -> slice:
    """The rows (or columns) of a dimension of `size` that `rank` of `world` holds; `size` must divide."""
    assert size % world == 0, f"{size} does not split over {world} ranks: check_tp_size comes first"
    part = size // world
    return slice(rank * part, (rank + 1) * part)
