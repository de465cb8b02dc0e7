"""The latent cache: what attention remembers of each token, in a pool of blocks.

A token's entry in a layer is its normalised latent (`kv_lora_rank`) and the rotary part of its key. A sequence owns
whole blocks; its block table says which, in order. Lengths and tables are tensors, so a decode step has fixed shapes.
"""

from dataclasses import dataclass

import torch

from moe_int8.models.deepseek.config import DeepseekConfig

BLOCK_SIZE = 64  # tokens


@dataclass(frozen=True)
class Batch:
    """The tokens of one forward pass, T in all, from B sequences.

    Attributes:
        positions: int64 [T], each token's place in its sequence.
        slots: int64 [T], where its entry goes: block * BLOCK_SIZE + place in the block.
        block_table: int64 [B, blocks], the blocks of each sequence in order; rows are padded with any valid block.
        lengths: int64 [B], tokens in each sequence's cache once this pass has written its own.
        spans: prefill: the positions that each sequence contributes, in order; None: decode, one token each (T = B).
    """

    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    spans: list[range] | None = None


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


class LatentCache:
    """The pool of all layers, and the blocks that are free.

    Args:
        num_blocks: blocks in each layer's pool.
        dtype: of the entries.
    """

    def __init__(self, config: DeepseekConfig, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, num_blocks, BLOCK_SIZE, config.latent_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.free = list(range(num_blocks))

    def layer(self, index: int) -> torch.Tensor:
        """The pool of one layer, [blocks, BLOCK_SIZE, latent_dim]."""
        return self.pool[index]

    def take(self, count: int) -> list[int] | None:
        """`count` free blocks, or None if there are not so many."""
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Return a finished sequence's blocks."""
        self.free.extend(blocks)

    def give_back_all(self) -> None:
        """Return every block: those who held them have ended, in whatever way."""
        self.free = list(range(self.pool.shape[1]))

    @staticmethod
    def bytes_per_token(config: DeepseekConfig, dtype: torch.dtype) -> int:
        """Bytes of one token over all layers; every rank holds the whole latent."""
        return config.num_hidden_layers * config.latent_dim * dtype.itemsize


def write_latent(pool: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor) -> None:
    """Store one entry a token: pool [blocks, BLOCK_SIZE, D], slots [T], latent [T, D]."""
    pool.view(-1, pool.shape[-1]).index_copy_(0, slots, latent.to(pool.dtype))


def read_latent(pool: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """The entries of sequences in order: block_table [..., blocks] -> [..., blocks * BLOCK_SIZE, D]."""
    return pool[block_table].flatten(-3, -2)
