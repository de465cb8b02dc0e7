"""Multi-head latent attention (DeepSeek-V2, section 2.1).

Keys and values of all heads come from one latent a token through kv_b_proj = [W_UK; W_UV]. The *naive* form expands
them; the *absorbed* form folds W_UK into the query and applies W_UV after the sum over tokens. They are equal; the
first costs less for many query tokens, the second for one.
"""

import torch
from einops import rearrange
from torch import nn

from moe_int8.models.deepseek.attention import decode_attention, prefill_attention
from moe_int8.models.deepseek.cache import Batch, write_latent
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.norm import RMSNorm
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.rope import rotate
from moe_int8.parallel import ColumnParallelLinear, Group, Linear, RowParallelLinear, WeightFormat

LATENT_NORM_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm: fixed in the released models, not in config.json


class MLA(nn.Module):
    """Attention of one layer; the heads are split over `group`.

    Args:
        prefix: the module's name in the checkpoint.
    """

    def __init__(self, config: DeepseekConfig, prefix: str, precision: Precision, group: Group) -> None:
        super().__init__()

        def form(name: str) -> WeightFormat:
            return precision.form(f"{prefix}.{name}")

        self.nope, self.rope_dim, self.v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank = config.kv_lora_rank
        self.softmax_scale = config.softmax_scale
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_lora_rank = config.q_lora_rank
        q_features = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, q_features, form("q_proj"), group)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, form("q_a_proj"))
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_NORM_EPS, precision.dtype)
            self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, q_features, form("q_b_proj"), group)
        self.kv_a_proj_with_mqa = Linear(hidden, config.latent_dim, form("kv_a_proj_with_mqa"))
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPS, precision.dtype)
        # Never int8: prefill would quantise the latents and decode the queries, and the two would disagree.
        self.kv_b_proj = ColumnParallelLinear(
            self.rank, heads * (self.nope + self.v_dim), WeightFormat(precision.dtype), group
        )
        self.o_proj = RowParallelLinear(heads * self.v_dim, hidden, form("o_proj"), group)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pool: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], a partial sum over the ranks; writes this pass's latents into `pool`.

        cos, sin [T, rope / 2] are the angles of `batch.positions`.
        """
        q_nope, q_pe = self.query(x)
        kv_c, k_pe = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope_dim], dim=-1)
        q_pe, k_pe = rotate(q_pe, cos, sin), rotate(k_pe, cos, sin)
        write_latent(pool, batch.slots, torch.cat((self.kv_a_layernorm(kv_c), k_pe), dim=-1))
        attend = self.absorbed if batch.spans is None else self.naive
        return self.o_proj(attend(q_nope, q_pe, pool, batch).flatten(1))

    def query(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> q_nope [T, heads, nope], q_pe [T, heads, rope], not yet rotated."""
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = q.unflatten(-1, (-1, self.nope + self.rope_dim)).split([self.nope, self.rope_dim], dim=-1)
        return q_nope, q_pe

    def naive(self, q_nope: torch.Tensor, q_pe: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
        """-> [T, heads, v_head_dim]; any number of tokens a sequence."""
        w_uk, w_uv = self.expanding_weights()
        q = torch.cat((q_nope, q_pe), dim=-1)
        return prefill_attention(q, w_uk, w_uv, pool, batch, self.softmax_scale)

    def absorbed(self, q_nope: torch.Tensor, q_pe: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
        """-> [T, heads, v_head_dim]; one token a sequence."""
        w_uk, w_uv = self.expanding_weights()
        q_latent = torch.einsum("bhn,hnr->bhr", q_nope, w_uk)
        latent = decode_attention(q_latent, q_pe, pool, batch, self.softmax_scale)
        return torch.einsum("bhr,hvr->bhv", latent, w_uv)

    def expanding_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [heads, nope, rank] and W_UV [heads, v, rank], views of kv_b_proj."""
        per_head = rearrange(self.kv_b_proj.weight, "(h d) r -> h d r", d=self.nope + self.v_dim)
        return per_head[:, : self.nope], per_head[:, self.nope :]
