"""The demo model: its sizes, and transformers' DeepSeek-V3 made ready for training."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCAB_SIZE = 640
CONTEXT = 16384
DEMO: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "kv_lora_rank": 512,  # with a rotary part of 64 what vLLM's attention on a CPU can serve
    "max_position_embeddings": CONTEXT,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 96,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": CONTEXT // 4,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}
# For a trial on a CPU: everything is there, but small.
TINY = DEMO | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SIZES = {"demo": DEMO, "tiny": TINY}
ROWS = {"demo": (512, 2048), "tiny": (256, 512)}  # tokens in a row of the training, first and later


class WideExperts(nn.Module):
    """All experts of a layer as one wide MLP, in which those that a token did not choose are multiplied by 0.

    It has the parameters of transformers' experts and gives the same output. A few large matrix products are faster
    than sorting tokens by expert as long as the experts are this small.

    Attributes:
        load: fp32 [E], how many times each expert was chosen since it was last set to 0.
    """

    load: torch.Tensor

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        assert isinstance(experts.gate_up_proj, nn.Parameter)
        assert isinstance(experts.down_proj, nn.Parameter)
        self.gate_up_proj = experts.gate_up_proj  # [E, 2I, H], gate rows, then up rows
        self.down_proj = experts.down_proj  # [E, H, I]
        chosen = torch.zeros(len(self.down_proj), device=self.down_proj.device)
        self.register_buffer("load", chosen, persistent=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, topk], [T, topk] -> [T, H]."""
        E, H, inter = self.down_proj.shape
        shape = (len(hidden_states), E)
        weights = torch.zeros(shape, device=hidden_states.device).scatter(1, top_k_index, top_k_weights.float())
        self.load += (weights > 0).sum(0)
        gate, up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1)).view(-1, E, 2 * inter).chunk(2, dim=-1)
        hidden = (F.silu(gate) * up * weights[..., None].to(gate.dtype)).flatten(1)
        return F.linear(hidden, self.down_proj.transpose(0, 1).reshape(H, E * inter)).to(hidden_states.dtype)


def build_model(config: dict[str, Any], device: torch.device) -> DeepseekV3ForCausalLM:
    """A model with new weights in fp32, ready for training under autocast."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config))
    nn.Module.to(model, device)  # transformers' own `to` hides its types
    for moe in moe_layers(model):
        moe.experts = WideExperts(moe.experts)
        # Its input is cast to fp32 by the model, which autocast would undo.
        moe.gate.forward = torch.autocast(device.type, enabled=False)(moe.gate.forward)
    return model.train()


def moe_layers(model: DeepseekV3ForCausalLM) -> list[Any]:
    """The feed-forward parts that have experts."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
