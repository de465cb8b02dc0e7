"""A dense and a MoE layer of DeepSeek R1's true width, as rank 0 of 16, on a GPU against the CPU."""

import pytest
import torch

from moe_int8.models.deepseek.cache import Batch, LatentCache
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.memory import weight_bytes
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.published import R1
from moe_int8.models.deepseek.random_weights import fill_randomly
from moe_int8.parallel import Group, Groups

R1_TWO_LAYERS = DeepseekConfig.from_dict(R1 | {"num_hidden_layers": 2, "first_k_dense_replace": 1})
TOKENS = 48


class Rank0of16(Group):
    """Shards as one of 16 ranks, and adds up nothing."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


# A row rounded to multiples of amax / 127 is off by amax / 127 / sqrt(12) in the root mean square; with amax = 4 rms,
# relative to the row:
ROUNDING = 4 / 127 / 12**0.5


@pytest.mark.gpu
@pytest.mark.parametrize("accumulator", ["int32", "fp32"])
def test_layers_of_true_width_agree_with_the_cpu(accumulator):
    """Attention and feed-forward of a dense and a MoE layer, each from the same input on both devices.

    Integer products are equal bit for bit, norms nearly always. Feed-forward differs by exp alone, whose last bits
    seldom move a bf16 rounding or a code: less than half a bf16 step, 2^-8. Attention sums in another order, so most
    of its outputs may differ by a bf16 step, 2^-8 of themselves; before o_proj that flips codes near a boundary by
    one, which is at most the noise of rounding itself, ROUNDING. Margin 2.
    """
    groups = Groups(tp=Rank0of16(0, 16))
    precision = Precision(torch.bfloat16, lambda name: True, accumulator)
    models = {device: DeepseekModel(R1_TWO_LAYERS, precision, groups, device) for device in ("cuda", "cpu")}
    fill_randomly(models["cuda"])
    models["cpu"].load_state_dict(models["cuda"].state_dict())
    assert models["cuda"].weight_bytes() == weight_bytes(R1_TWO_LAYERS, precision, 16)

    x = torch.randn(TOKENS, R1_TWO_LAYERS.hidden_size).bfloat16()
    for index in range(2):
        attention, feed_forward = {}, {}
        for device, model in models.items():
            batch = Batch(
                positions=torch.arange(TOKENS, device=device),
                slots=torch.arange(TOKENS, device=device),
                block_table=torch.zeros(1, 1, dtype=torch.int64, device=device),
                lengths=torch.tensor([TOKENS], device=device),
                spans=[range(TOKENS)],
            )
            pool = LatentCache(R1_TWO_LAYERS, 1, torch.bfloat16, torch.device(device)).layer(index)
            angles = model.rotary.angles(batch.positions)
            layer = model.layers[index]
            with torch.inference_mode():
                attention[device] = layer.self_attn(x.to(device), *angles, pool, batch).float().cpu()
                feed_forward[device] = layer.mlp(x.to(device)).float().cpu()
        assert relative_error(attention) < 2 * ROUNDING
        assert relative_error(feed_forward) < 2**-8


def relative_error(out: dict[str, torch.Tensor]) -> float:
    """Of the whole output, GPU against CPU."""
    return float((out["cuda"] - out["cpu"]).norm() / out["cpu"].norm())
