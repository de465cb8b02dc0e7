"""Attention over the latent cache in plain torch: the two functions that a fused kernel may replace, one by one."""

import torch
import torch.nn.functional as F

from moe_int8.models.deepseek.cache import Batch, blocks_for, read_latent


def prefill_attention(
    q: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    pool: torch.Tensor,
    batch: Batch,
    softmax_scale: float,
) -> torch.Tensor:
    """Naive form: keys and values are expanded from each sequence's latents, this pass's own tokens included.

    Args:
        q: [T, heads, nope + rope], rotated.
        w_uk: [heads, nope, kv_lora_rank], expands a latent to the unrotated part of the keys.
        w_uv: [heads, v_head_dim, kv_lora_rank], expands it to the values.
        pool: [blocks, BLOCK_SIZE, kv_lora_rank + rope], this layer's.

    Returns:
        [T, heads, v_head_dim].
    """
    assert batch.spans is not None
    rank = w_uk.shape[-1]
    outputs = []
    start = 0
    for sequence, span in enumerate(batch.spans):
        rows = slice(start, start + len(span))
        positions = batch.positions[rows]
        length = span.stop  # all earlier tokens of the sequence are in the cache
        latent = read_latent(pool, batch.block_table[sequence, : blocks_for(length)])[:length].to(q.dtype)  # [S, D]
        kv_c, k_pe = latent[:, :rank], latent[:, rank:]
        k_nope = torch.einsum("sr,hnr->hsn", kv_c, w_uk)
        k = torch.cat((k_nope, k_pe.expand(k_nope.shape[0], -1, -1)), dim=-1)  # [heads, S, nope + rope]
        v = torch.einsum("sr,hvr->hsv", kv_c, w_uv)
        visible = torch.arange(length, device=q.device) <= positions[:, None]  # [span, S]
        out = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=softmax_scale
        )
        outputs.append(out[0].transpose(0, 1))
        start = rows.stop
    return torch.cat(outputs)


def decode_attention(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    pool: torch.Tensor,
    batch: Batch,
    softmax_scale: float,
) -> torch.Tensor:
    """Absorbed form: the query was carried into the latent space, so the latents serve as keys and as values.

    One token a sequence, shapes independent of the lengths.

    Args:
        q_latent: [B, heads, kv_lora_rank].
        q_pe: [B, heads, rope], rotated.
        pool: [blocks, BLOCK_SIZE, kv_lora_rank + rope], this layer's.

    Returns:
        [B, heads, kv_lora_rank] in q_latent's dtype; scores and sums are fp32.
    """
    rank = q_latent.shape[-1]
    latent = read_latent(pool, batch.block_table)  # [B, S, D]
    visible = torch.arange(latent.shape[1], device=latent.device) < batch.lengths[:, None]  # [B, S]
    latent = latent.masked_fill(~visible[..., None], 0).float()  # what another sequence left may be NaN
    q = torch.cat((q_latent, q_pe), dim=-1).float()
    scores = torch.einsum("bhd,bsd->bhs", q, latent) * softmax_scale
    probabilities = scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("bhs,bsr->bhr", probabilities, latent[..., :rank]).to(q_latent.dtype)
