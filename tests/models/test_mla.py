"""Attention: two forms of one function, on a cache whose blocks lie anywhere and whose rest may hold anything."""

import dataclasses

import pytest
import torch
from tiny import V3, make_batch

from moe_int8.models.deepseek.attention import decode_attention, prefill_attention
from moe_int8.models.deepseek.cache import BLOCK_SIZE, LatentCache, blocks_for, read_latent, write_latent
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.mla import MLA
from moe_int8.models.deepseek.precision import Precision
from moe_int8.models.deepseek.rope import RotaryEmbedding
from moe_int8.parallel import Group
from moe_int8.parallel.linear import EVERYTHING
from moe_int8.quantize import dequantize

CONFIG = DeepseekConfig.from_dict(V3)
TINY = dataclasses.replace(  # case 37: 2 heads, nope 4, rope 2, v 4, rank 3
    CONFIG,
    hidden_size=16,
    num_attention_heads=2,
    q_lora_rank=None,
    kv_lora_rank=3,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
)


ONE = Group()


class Stored:
    """A weight source over tensors: int8 codes with scales, or floating point."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self.weight, self.scale, self.shape = weight, scale, tuple(weight.shape)

    def read_int8(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight[rows, columns], self.scale[rows]

    def read_float(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        if self.scale is not None:
            return dequantize(self.weight, self.scale, dtype)[rows, columns]
        return self.weight[rows].to(dtype) if columns == EVERYTHING else self.weight[rows, columns].to(dtype)


def make_mla(config: DeepseekConfig = TINY, int8: bool = False, group: Group = ONE) -> MLA:
    mla = MLA(config, "model.layers.0.self_attn", Precision(torch.float32, lambda name: int8), group)
    for name, parameter in mla.named_parameters():
        if parameter.dtype == torch.int8:
            parameter.data = torch.randint(-127, 128, parameter.shape, dtype=torch.int8)
        elif name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("_scale"):
            parameter.data.uniform_(0.002, 0.006)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return mla


@pytest.mark.parametrize(
    "codes, scales, expected",
    [
        ([[127, 127], [127, 127]], [1, 10], [[1, 1], [10, 10]]),
        ([[127, 0], [0, 127], [127, 127], [127, -127]], [1, 2, 3, 4], [[1, 0], [0, 2], [3, 3], [4, -4]]),
    ],
)
def test_c36_kv_b_is_dequantized_by_row_at_load(codes, scales, expected):
    codes, scales = torch.tensor(codes, dtype=torch.int8), torch.tensor(scales) / 127
    config = dataclasses.replace(
        TINY, num_attention_heads=1, kv_lora_rank=2, qk_nope_head_dim=codes.shape[0] - 1, v_head_dim=1
    )
    mla = make_mla(config, int8=True)
    mla.kv_b_proj.load(Stored(codes, scales))
    assert mla.kv_b_proj.weight.dtype == torch.float32
    torch.testing.assert_close(mla.kv_b_proj.weight.data, torch.tensor(expected, dtype=torch.float32))


def test_c36_the_heads_of_a_rank_are_its_rows_of_kv_b():
    whole = torch.randn(2 * 8, 3)
    for rank in range(2):
        mla = make_mla(group=Group(rank, 2))
        mla.kv_b_proj.load(Stored(whole))
        w_uk, w_uv = mla.expanding_weights()
        head = whole[rank * 8 : (rank + 1) * 8]
        assert torch.equal(w_uk, head[None, :4])
        assert torch.equal(w_uv, head[None, 4:])


@pytest.mark.parametrize("config", [TINY, CONFIG], ids=["case", "more heads"])
def test_c37_naive_equals_absorbed_per_head(config):
    mla = make_mla(config)
    heads = config.num_attention_heads
    codes = torch.randint(-127, 128, mla.kv_b_proj.weight.shape, dtype=torch.int8)
    mla.kv_b_proj.load(Stored(codes, torch.rand(codes.shape[0]) / 127))
    pool = torch.full((1, BLOCK_SIZE, config.latent_dim), float("nan"))
    pool[0, :5] = torch.randn(5, config.latent_dim)
    q_nope, q_pe = torch.randn(5, heads, config.qk_nope_head_dim), torch.randn(5, heads, config.qk_rope_head_dim)

    naive = mla.naive(q_nope, q_pe, pool, make_batch([[0]], [range(5)]))
    for position in range(5):
        batch = make_batch([[0]], [range(position, position + 1)], decode=True)
        absorbed = mla.absorbed(q_nope[position, None], q_pe[position, None], pool, batch)
        for head in range(heads):
            torch.testing.assert_close(absorbed[0, head], naive[position, head], rtol=0, atol=1e-5)


def test_both_forms_equal_attention_written_out():
    mla = make_mla()
    w_uk, w_uv = mla.expanding_weights()
    latent = torch.randn(5, 3 + 2)
    pool = torch.zeros(1, BLOCK_SIZE, 5)
    pool[0, :5] = latent
    q = torch.randn(1, 2, 4 + 2)
    expected = torch.empty(2, 4)
    for head in range(2):
        keys = torch.stack([torch.cat((w_uk[head] @ token[:3], token[3:])) for token in latent])
        values = torch.stack([w_uv[head] @ token[:3] for token in latent])
        expected[head] = torch.softmax(keys @ q[0, head] * mla.softmax_scale, dim=0) @ values
    for decode, form in ((False, mla.naive), (True, mla.absorbed)):
        out = form(q[..., :4], q[..., 4:], pool, make_batch([[0]], [range(4, 5)], decode))
        torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("int8", [False, True])
def test_two_ranks_hold_the_heads_of_one(int8):
    """The heads of o_proj's input are split, so partial outputs add up to the whole (float; int8 rounds each slice)."""
    whole = make_mla(CONFIG, int8)
    x = torch.randn(3, CONFIG.hidden_size)
    cos, sin = RotaryEmbedding(CONFIG.qk_rope_head_dim, CONFIG.rope).angles(torch.arange(3))
    batch = make_batch([[0]], [range(3)])

    def run(mla: MLA) -> torch.Tensor:
        return mla(x, cos, sin, torch.zeros(1, BLOCK_SIZE, CONFIG.latent_dim), batch)

    total = torch.zeros_like(x)
    for rank in range(2):
        part = make_mla(CONFIG, int8, Group(rank, 2))
        for name, module in part.named_children():
            own = getattr(whole, name)
            module.load(Stored(own.weight.data, own.weight_scale.data if hasattr(own, "weight_scale") else None))
        total += run(part)
    expected = run(whole)
    if int8:  # o_proj's input rows, 80 values in one slice or in two: each rounds to 1/127 of its largest
        assert (total - expected).square().mean().sqrt() < 0.02 * expected.square().mean().sqrt()
    else:
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


def test_blocks_may_lie_in_any_order():
    mla = make_mla(CONFIG)
    length = 2 * BLOCK_SIZE + 9
    x = torch.randn(length, CONFIG.hidden_size)
    cos, sin = RotaryEmbedding(CONFIG.qk_rope_head_dim, CONFIG.rope).angles(torch.arange(length))
    outputs = []
    for own in ([0, 1, 2], [4, 0, 3]):
        pool = torch.full((5, BLOCK_SIZE, CONFIG.latent_dim), float("nan"))  # whatever is not ours must not matter
        prefilled = mla(x[:-1], cos[:-1], sin[:-1], pool, make_batch([own], [range(length - 1)]))
        last = make_batch([own], [range(length - 1, length)], decode=True)
        outputs.append(torch.cat((prefilled, mla(x[-1:], cos[-1:], sin[-1:], pool, last))))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("decode", [False, True])
def test_nan_of_another_sequence_or_of_unwritten_slots_does_not_leak(decode):
    clean = torch.randn(4, BLOCK_SIZE, CONFIG.latent_dim)
    dirty = clean.clone()
    dirty[1] = float("nan")  # another sequence's block
    dirty[2, 10:] = float("inf")  # unwritten slots of ours
    dirty[3] = float("nan")  # the padding of our row of the block table
    span = range(BLOCK_SIZE + 9, BLOCK_SIZE + 10)
    batch = make_batch([[0, 2]], [span], decode)
    batch = dataclasses.replace(batch, block_table=torch.tensor([[0, 2, 3]]))
    heads = CONFIG.num_attention_heads
    w_uk = torch.randn(heads, CONFIG.qk_nope_head_dim, CONFIG.kv_lora_rank)
    w_uv = torch.randn(heads, CONFIG.v_head_dim, CONFIG.kv_lora_rank)
    q_pe = torch.randn(1, heads, CONFIG.qk_rope_head_dim)
    q_nope = torch.randn(1, heads, CONFIG.kv_lora_rank if decode else CONFIG.qk_nope_head_dim)

    def attend(pool: torch.Tensor) -> torch.Tensor:
        if decode:
            return decode_attention(q_nope, q_pe, pool, batch, 0.2)
        return prefill_attention(torch.cat((q_nope, q_pe), dim=-1), w_uk, w_uv, pool, batch, 0.2)

    assert torch.equal(attend(dirty), attend(clean))


def test_a_later_token_is_not_visible():
    mla = make_mla(CONFIG)
    x = torch.randn(6, CONFIG.hidden_size)
    cos, sin = RotaryEmbedding(CONFIG.qk_rope_head_dim, CONFIG.rope).angles(torch.arange(6))

    def run(x: torch.Tensor) -> torch.Tensor:
        pool = torch.zeros(1, BLOCK_SIZE, CONFIG.latent_dim)
        return mla(x, cos, sin, pool, make_batch([[0]], [range(6)]))

    changed = x.clone()
    changed[4] += 1
    torch.testing.assert_close(run(changed)[:4], run(x)[:4], rtol=0, atol=1e-6)
    assert not torch.allclose(run(changed)[4:], run(x)[4:], atol=1e-3)


def test_the_cache_holds_the_normalized_latent_and_the_rotated_key():
    mla = make_mla(CONFIG)
    x = torch.randn(2, CONFIG.hidden_size)
    cos, sin = RotaryEmbedding(CONFIG.qk_rope_head_dim, CONFIG.rope).angles(torch.tensor([0, 70]))
    pool = torch.zeros(2, BLOCK_SIZE, CONFIG.latent_dim)
    batch = dataclasses.replace(
        make_batch([[0], [0, 1]], [range(1), range(70, 71)]), slots=torch.tensor([3, BLOCK_SIZE + 5])
    )
    mla(x, cos, sin, pool, batch)
    projected = torch.nn.functional.linear(x, mla.kv_a_proj_with_mqa.weight)
    entry = pool[1, 5]
    latent, key = projected[1].split([CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim])
    normalized = latent * (latent.square().mean() + 1e-6).rsqrt() * mla.kv_a_layernorm.weight
    torch.testing.assert_close(entry[: CONFIG.kv_lora_rank], normalized, rtol=0, atol=1e-5)
    assert entry[CONFIG.kv_lora_rank :].norm() == pytest.approx(float(key.norm()), rel=1e-5)
    assert not torch.allclose(entry[CONFIG.kv_lora_rank :], key, atol=1e-2)
    assert pool.flatten(0, 1).any(dim=-1).nonzero().flatten().tolist() == [3, BLOCK_SIZE + 5]


def test_the_pool_hands_out_each_block_once_and_takes_it_back():
    cache = LatentCache(CONFIG, 5, torch.float32, torch.device("cpu"))
    first, second = cache.take(3), cache.take(2)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert cache.take(1) is None
    cache.give_back(first)
    assert cache.take(4) is None
    assert sorted(cache.take(3)) == sorted(first)


def test_blocks_for_counts_started_blocks():
    assert [blocks_for(tokens) for tokens in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


def test_written_entries_are_read_back_in_order():
    pool = torch.zeros(3, BLOCK_SIZE, 2)
    latent = torch.arange(2.0 * (BLOCK_SIZE + 2)).view(-1, 2)
    slots = torch.tensor([*range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE), 0, 1])  # block 2, then block 0
    write_latent(pool, slots, latent)
    assert torch.equal(read_latent(pool, torch.tensor([2, 0]))[: BLOCK_SIZE + 2], latent)
    assert read_latent(pool, torch.tensor([[2, 0], [1, 1]])).shape == (2, 2 * BLOCK_SIZE, 2)
