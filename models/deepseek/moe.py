"""The feed-forward half of a layer: a dense MLP, or routed experts beside a shared one."""

import torch
import torch.nn.functional as F
from torch import nn

from moe_int8.activation import silu_and_mul
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.precision import Precision
from moe_int8.moe import fused_moe
from moe_int8.parallel import Group, MergedColumnParallelLinear, RowParallelLinear, WeightFormat, WeightSource, shard
from moe_int8.parallel.linear import EVERYTHING, KeepsFloat32, expect_shape
from moe_int8.routing import grouped_topk

GATE, UP = 0, 1  # parts of a merged gate_up projection, in this order


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); the intermediate size is split over `group`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, prefix: str, precision: Precision, group: Group
    ) -> None:
        super().__init__()
        sizes = [intermediate_size, intermediate_size]
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, precision.form(f"{prefix}.gate_proj"), group)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, precision.form(f"{prefix}.down_proj"), group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, hidden] -> [M, hidden], a partial sum over the ranks."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class Gate(KeepsFloat32):
    """The router: which experts a token goes to, and with what weights. In fp32 from the logits on."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        E = config.n_routed_experts
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size, dtype=torch.float32), requires_grad=False)
        self.float32 = ("weight",)
        self.e_score_correction_bias = None
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nn.Parameter(torch.empty(E, dtype=torch.float32), requires_grad=False)
            self.float32 = ("weight", "e_score_correction_bias")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, hidden] -> topk_weights fp32 [M, topk], topk_ids int32 [M, topk], the same on every rank.

        Raises:
            ValueError: this process rounds fp32 products to TF32, which sends tokens to the wrong experts.
        """
        if x.is_cuda and torch.get_float32_matmul_precision() != "highest":
            raise ValueError(
                f"torch's float32_matmul_precision is {torch.get_float32_matmul_precision()!r}, and the router needs "
                "'highest': call torch.set_float32_matmul_precision('highest')"
            )
        config = self.config
        return grouped_topk(
            F.linear(x.float(), self.weight),
            self.e_score_correction_bias,
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            renormalize=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            scoring=config.scoring_func,
            group_score=config.group_score,
        )

    def load(self, source: WeightSource) -> None:
        """Fill the weight."""
        expect_shape(source, self.weight.shape)
        self.weight.data.copy_(source.read_float(EVERYTHING, EVERYTHING, torch.float32))

    def load_bias(self, source: WeightSource) -> None:
        """Fill the correction bias."""
        assert self.e_score_correction_bias is not None
        expect_shape(source, self.e_score_correction_bias.shape)
        bias = source.read_float(EVERYTHING, EVERYTHING, torch.float32)
        if not bias.isfinite().all():
            raise ValueError("the router's correction bias has values that are not finite")
        self.e_score_correction_bias.data.copy_(bias)


class Experts(KeepsFloat32):
    """The routed experts; each rank of `group` holds 1/size of every expert's intermediate size.

    w13 is [E, 2 * I, hidden], gate rows then up rows; w2 is [E, hidden, I].
    """

    def __init__(self, config: DeepseekConfig, form: WeightFormat, group: Group) -> None:
        super().__init__()
        self.form = form
        self.whole = (config.moe_intermediate_size, config.hidden_size)
        self.own = shard(config.moe_intermediate_size, group.rank, group.size)
        E, hidden, inter = config.n_routed_experts, config.hidden_size, self.own.stop - self.own.start
        self.parts = {GATE: slice(0, inter), UP: slice(inter, 2 * inter)}
        dtype = torch.int8 if form.int8 else form.dtype
        if not form.int8 and (inter * dtype.itemsize % 16 or hidden * dtype.itemsize % 16):
            raise ValueError(
                f"experts in {str(dtype).removeprefix('torch.')} need rows of a multiple of 16 bytes: hidden_size is "
                f"{hidden} and moe_intermediate_size a rank {inter}; use int8, or fewer ranks"
            )
        self.w13 = nn.Parameter(torch.empty(E, 2 * inter, hidden, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(E, hidden, inter, dtype=dtype), requires_grad=False)
        if form.int8:
            self.w13_scale = nn.Parameter(torch.empty(E, 2 * inter, dtype=torch.float32), requires_grad=False)
            self.w2_scale = nn.Parameter(torch.empty(E, hidden, dtype=torch.float32), requires_grad=False)
            self.float32 = ("w13_scale", "w2_scale")

    def forward(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """x [M, hidden] -> [M, hidden], a partial sum over the ranks."""
        if not self.form.int8:
            return experts_float(x, self.w13, self.w2, topk_weights, topk_ids)
        return fused_moe(
            x,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            topk_weights,
            topk_ids,
            accumulator=self.form.accumulator,
        )

    def load_gate_up(self, expert: int, part: int, source: WeightSource) -> None:
        """Fill the gate (or up) rows of one expert."""
        expect_shape(source, self.whole)
        rows = self.parts[part]
        if self.form.int8:
            weight, scale = source.read_int8(self.own, EVERYTHING)
            self.w13_scale.data[expert, rows].copy_(scale)
        else:
            weight = source.read_float(self.own, EVERYTHING, self.form.dtype)
        self.w13.data[expert, rows].copy_(weight)

    def load_down(self, expert: int, source: WeightSource) -> None:
        """Fill the down projection of one expert; its scales belong to output channels and are not cut."""
        expect_shape(source, self.whole[::-1])
        if self.form.int8:
            weight, scale = source.read_int8(EVERYTHING, self.own)
            self.w2_scale.data[expert].copy_(scale)
        else:
            weight = source.read_float(EVERYTHING, self.own, self.form.dtype)
        self.w2.data[expert].copy_(weight)


def experts_float(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """The routed experts with floating-point weights, the baseline: torch's grouped matrix product over sorted slots.

    Shapes as in `fused_moe`; rows of x, of w13 and of w2 must be multiples of 16 bytes. Each weighted expert output is
    rounded to x's dtype, their sum is fp32.
    """
    M, topk = topk_ids.shape
    ids, order = topk_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(w13.shape[0], device=x.device, dtype=ids.dtype), right=True)
    ends = ends.to(torch.int32)  # where each expert's slots end
    h = silu_and_mul(F.grouped_mm(x[order // topk], w13.mT, offs=ends))
    weighted = F.grouped_mm(h, w2.mT, offs=ends).float() * topk_weights.flatten()[order, None]
    outputs = torch.empty_like(weighted, dtype=x.dtype)
    outputs[order] = weighted.to(x.dtype)
    return outputs.view(M, topk, x.shape[1]).sum(dim=1, dtype=torch.float32).to(x.dtype)


class MoE(nn.Module):
    """Routed experts and the shared expert, added."""

    def __init__(self, config: DeepseekConfig, prefix: str, precision: Precision, group: Group) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, precision.form(f"{prefix}.experts.0.gate_proj"), group)
        self.shared_experts = None
        if config.n_shared_experts:
            self.shared_experts = MLP(
                config.hidden_size,
                config.n_shared_experts * config.moe_intermediate_size,
                f"{prefix}.shared_experts",
                precision,
                group,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, hidden] -> [M, hidden], a partial sum over the ranks."""
        topk_weights, topk_ids = self.gate(x)
        routed = self.experts(x, topk_weights, topk_ids)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
