"""The decoder: read this first, top down. A token's way: embedding, layers (attention, feed-forward), norm, head.

Every part returns what its rank can compute alone. A decoder layer adds these partial sums up over the ranks, adds the
residual and normalises, in one place (`reduce_add_norm`).
"""

import torch
from torch import nn

from moe_int8.models.deepseek.cache import Batch, LatentCache
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.mla import MLA
from moe_int8.models.deepseek.moe import MLP, MoE
from moe_int8.models.deepseek.norm import RMSNorm
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.rope import RotaryEmbedding
from moe_int8.parallel import Group, Groups, VocabularyParallelEmbedding, VocabularyParallelHead, check_tp_size


class DeepseekModel(nn.Module):
    """DeepSeek V2 or V3, this rank's share of it.

    Args:
        groups: who shares the model; only `tp` is used.
        device: where the parameters are made ("meta" to measure without memory). They are not initialised.

    Raises:
        ValueError: the model does not split over `groups.tp`.
    """

    def __init__(
        self, config: DeepseekConfig, precision: Precision, groups: Groups, device: torch.device | str
    ) -> None:
        super().__init__()
        check_tp_size(groups.tp.size, config.sharded_dimensions())
        dtype = precision.dtype
        self.config = config
        self.precision = precision
        self.group = groups.tp
        self.rotary = RotaryEmbedding(config.qk_rope_head_dim, config.rope)
        with torch.device(device):
            self.embed_tokens = VocabularyParallelEmbedding(config.vocab_size, config.hidden_size, dtype, groups.tp)
            self.layers = nn.ModuleList(
                DecoderLayer(config, layer, precision, groups.tp) for layer in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.lm_head = VocabularyParallelHead(config.vocab_size, config.hidden_size, dtype, groups.tp)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, batch: Batch, cache: LatentCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the tokens of `batch` and store their latents in `cache`.

        Args:
            token_ids: int64 [T].

        Returns:
            The normalised hidden state [T, hidden], which `logits` takes, and the one before the last norm.
        """
        cos, sin = self.rotary.angles(batch.positions)
        partial = self.embed_tokens(token_ids)
        residual = None
        for index, layer in enumerate(self.layers):
            partial, residual = layer(partial, residual, cos, sin, cache.layer(index), batch)
        return reduce_add_norm(partial, residual, self.norm, self.group)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden states [T, hidden] -> fp32 [T, vocab_size], whole on every rank."""
        return self.lm_head(hidden)

    def weight_bytes(self) -> int:
        """Bytes of this rank's parameters."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and a residual sum."""

    def __init__(self, config: DeepseekConfig, index: int, precision: Precision, group: Group) -> None:
        super().__init__()
        self.group = group
        prefix = f"model.layers.{index}"
        dtype = precision.dtype
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = MLA(config, f"{prefix}.self_attn", precision, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp: MLP | MoE
        if config.is_moe(index):
            self.mlp = MoE(config, f"{prefix}.mlp", precision, group)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, f"{prefix}.mlp", precision, group)

    def forward(
        self,
        partial: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: torch.Tensor,
        batch: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the layer below's partial sum, residual) -> (this layer's partial sum, residual); all [T, hidden]."""
        hidden, residual = reduce_add_norm(partial, residual, self.input_layernorm, self.group)
        partial = self.self_attn(hidden, cos, sin, pool, batch)
        hidden, residual = reduce_add_norm(partial, residual, self.post_attention_layernorm, self.group)
        return self.mlp(hidden), residual


def reduce_add_norm(
    partial: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `partial` over the ranks, add the residual: returns (its norm, the sum, which is the next residual)."""
    hidden = group.all_reduce(partial)
    return (norm(hidden), hidden) if residual is None else norm.add(hidden, residual)
