import math

import pytest
import torch
from tiny import PLAIN_ROPE, V3, YARN
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from moe_int8.models.deepseek.config import RopeConfig
from moe_int8.models.deepseek.rope import RotaryEmbedding, inverse_frequencies, rotate

OFFICIAL = YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}


def rotated_dot(q: list[float], q_position: int, k: list[float], k_position: int, theta: float = 10000.0) -> float:
    rotary = RotaryEmbedding(len(q), RopeConfig(theta=theta))
    cos, sin = rotary.angles(torch.tensor([q_position, k_position]))
    q_rotated, k_rotated = rotate(torch.tensor([q, k], dtype=torch.float32), cos, sin)
    return float(q_rotated @ k_rotated)


def test_c39_pairs_are_interleaved():
    assert rotated_dot([1, 0, 0, 0], 1, [0, 1, 0, 0], 0) == pytest.approx(0.841471, abs=1e-6)  # sin 1; half-split: 0
    # the second pair turns by 1 / theta^(2/4) = 0.01 a position
    assert rotated_dot([0, 0, 1, 0], 1, [0, 0, 0, 1], 0) == pytest.approx(math.sin(0.01), abs=1e-6)


def test_only_the_distance_of_positions_matters():
    q, k = [0.3, -1.2, 0.7, 0.4], [1.1, 0.2, -0.5, 0.9]
    assert rotated_dot(q, 107, k, 100) == pytest.approx(rotated_dot(q, 7, k, 0), abs=1e-4)
    assert rotated_dot(q, 8, k, 0) != pytest.approx(rotated_dot(q, 7, k, 0), abs=1e-2)


def test_heads_are_rotated_alike_and_the_dtype_stays():
    rotary = RotaryEmbedding(8, RopeConfig())
    cos, sin = rotary.angles(torch.tensor([3, 9]))
    x = torch.randn(2, 5, 8).bfloat16()
    rotated = rotate(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    for head in range(5):
        assert torch.equal(rotated[:, head], rotate(x[:, head], cos, sin))


@pytest.mark.parametrize(
    "dim, parameters",
    [
        (64, OFFICIAL),
        (64, PLAIN_ROPE),
        (16, YARN),
        (64, OFFICIAL | {"beta_fast": 8, "beta_slow": 2}),
        (64, OFFICIAL | {"rope_theta": 500000.0, "mscale": 0.707, "mscale_all_dim": 0.5}),
        (8, YARN | {"original_max_position_embeddings": 8}),  # the ramp has no width: no division by zero
    ],
)
def test_frequencies_and_magnitude_equal_transformers(dim, parameters):
    context = int(parameters.get("original_max_position_embeddings", 64) * parameters.get("factor", 1))
    theirs = DeepseekV3RotaryEmbedding(
        DeepseekV3Config(
            **V3 | {"qk_rope_head_dim": dim, "rope_parameters": parameters, "max_position_embeddings": context}
        )
    )
    rope = RopeConfig.from_dict({"rope_parameters": parameters})
    torch.testing.assert_close(inverse_frequencies(dim, rope), theirs.inv_freq, rtol=1e-6, atol=0)
    assert RotaryEmbedding(dim, rope).magnitude == pytest.approx(theirs.attention_scaling)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    plain = inverse_frequencies(64, RopeConfig())
    yarn = inverse_frequencies(64, RopeConfig.from_dict({"rope_parameters": OFFICIAL}))
    assert yarn[0] == plain[0]
    assert yarn[-1] == pytest.approx(float(plain[-1]) / 40)
    assert (yarn[1:] < yarn[:-1]).all()


def test_the_ratio_of_the_mscales_enlarges_the_rotated_part():
    rope = RopeConfig.from_dict({"rope_parameters": OFFICIAL | {"mscale": 1.0, "mscale_all_dim": 0.0}})
    cos, sin = RotaryEmbedding(8, rope).angles(torch.tensor([5]))
    expected = 0.1 * math.log(40) + 1
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full((1, 4), expected))
    cos, sin = RotaryEmbedding(8, RopeConfig.from_dict({"rope_parameters": OFFICIAL})).angles(torch.tensor([5]))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(1, 4))  # both 1, as in V3


def test_positions_near_the_end_of_the_context_are_exact():
    cos, sin = RotaryEmbedding(64, RopeConfig()).angles(torch.tensor([163_839]))  # 163,840 in bf16
    assert (cos[0, 0].item(), sin[0, 0].item()) == pytest.approx((math.cos(163_839), math.sin(163_839)), abs=1e-6)


def test_angles_stay_fp32_whatever_the_model_is_cast_to():
    rotary = RotaryEmbedding(64, RopeConfig())
    expected = rotary.angles(torch.tensor([100_000]))
    cast = rotary.to(torch.bfloat16).angles(torch.tensor([100_000]))
    assert cast[0].dtype == torch.float32
    assert torch.equal(torch.stack(cast), torch.stack(expected))
    with torch.device("meta"):
        made_on_meta = RotaryEmbedding(64, RopeConfig())
    assert torch.equal(made_on_meta.angles(torch.tensor([7]))[0], rotary.angles(torch.tensor([7]))[0])


@pytest.mark.parametrize("theta", [1 + 2**-52, 1.5, 2.0**31])
@pytest.mark.parametrize("beta_fast, beta_slow", [(0.0011, 0.0011), (2.0**31, 0.0011), (0.0011, 2.0**31)])
@pytest.mark.parametrize("context", [1, 2**31 - 1])
def test_absurd_yarn_parameters_give_finite_frequencies(theta, beta_fast, beta_slow, context):
    """They come from config.json, which anyone can have written."""
    rope = RopeConfig(theta, 2.0**31, context, beta_fast, beta_slow)
    frequencies = inverse_frequencies(2048, rope)
    assert frequencies.isfinite().all()
    assert (frequencies <= 1).all()
