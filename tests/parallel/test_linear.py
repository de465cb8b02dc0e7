import pytest
import torch
import torch.nn.functional as F

from moe_int8.dense import w8a8_linear
from moe_int8.parallel import (
    ColumnParallelLinear,
    Group,
    Linear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    WeightFormat,
)
from moe_int8.parallel.vocabulary import VocabularyParallel
from moe_int8.quantize import quantize_per_channel

FLOAT = WeightFormat(torch.float32)
INT8 = WeightFormat(torch.float32, int8=True)


class Stored:
    """A weight source over tensors."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        self.weight, self.scale, self.shape = weight, scale, tuple(weight.shape)

    def read_int8(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight[rows, columns], self.scale[rows]

    def read_float(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.weight[rows, columns].to(dtype)


CODES = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.int8)
SCALES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_c50_column_parallel_cuts_scales_with_rows():
    layer = ColumnParallelLinear(2, 4, INT8, Group(1, 2))
    layer.load(Stored(CODES, SCALES))
    assert layer.weight.tolist() == [[5, 6], [7, 8]]
    assert layer.weight_scale.tolist() == [3.0, 4.0]


def test_c50_row_parallel_keeps_all_scales():
    layer = RowParallelLinear(2, 4, INT8, Group(1, 2))
    layer.load(Stored(CODES, SCALES))
    assert layer.weight.tolist() == [[2], [4], [6], [8]]
    assert layer.weight_scale.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("form", [FLOAT, INT8], ids=["float", "int8"])
def test_merged_column_parallel_holds_its_share_of_each_weight_in_order(form):
    a, b = torch.arange(1, 9).view(4, 2).to(torch.int8), torch.arange(-12, 0).view(6, 2).to(torch.int8)
    a_scale, b_scale = torch.arange(1.0, 5), torch.arange(10.0, 16)
    x = torch.tensor([[1.0, -2.0]])
    whole = MergedColumnParallelLinear(2, [4, 6], form, Group())
    parts = [MergedColumnParallelLinear(2, [4, 6], form, Group(rank, 2)) for rank in range(2)]
    for layer in (whole, *parts):
        layer.load_part(1, Stored(b, b_scale))
        layer.load_part(0, Stored(a, a_scale))
    for rank, layer in enumerate(parts):
        assert layer.weight.tolist() == [*a[2 * rank :][:2].tolist(), *b[3 * rank :][:3].tolist()]
        if form.int8:
            assert layer.weight_scale.tolist() == [*a_scale[2 * rank :][:2].tolist(), *b_scale[3 * rank :][:3].tolist()]
    first, second = whole(x).split([4, 6], dim=-1)
    halves = [layer(x).split([2, 3], dim=-1) for layer in parts]
    assert torch.equal(torch.cat([half[0] for half in halves], dim=-1), first)
    assert torch.equal(torch.cat([half[1] for half in halves], dim=-1), second)


def test_column_parallel_outputs_are_bit_identical_to_the_whole():
    w, scale = quantize_per_channel(torch.randn(12, 20))
    x = torch.randn(5, 20)
    expected = w8a8_linear(x, w, scale)
    outputs = []
    for rank in range(4):
        layer = ColumnParallelLinear(20, 12, INT8, Group(rank, 4))
        layer.load(Stored(w, scale.flatten()))
        outputs.append(layer(x))
    assert torch.equal(torch.cat(outputs, dim=-1), expected)


def test_row_parallel_partial_sums_add_up():
    w, x = torch.randn(12, 20), torch.randn(5, 20)
    total = torch.zeros(5, 12)
    for rank in range(4):
        layer = RowParallelLinear(20, 12, FLOAT, Group(rank, 4))
        layer.load(Stored(w))
        total += layer(x[:, rank * 5 : (rank + 1) * 5])
    torch.testing.assert_close(total, F.linear(x, w), rtol=1e-5, atol=1e-5)


def test_row_parallel_int8_quantizes_each_slice_with_its_own_scale():
    """x = [1, 0.003]: in one row 0.003 rounds to 0 (case 14); on a rank of its own it is its row's largest."""
    w, scale = torch.tensor([[0, 127]], dtype=torch.int8), torch.tensor([1.0])
    x = torch.tensor([[1.0, 0.003]])
    whole = RowParallelLinear(2, 1, INT8, Group())
    whole.load(Stored(w, scale))
    assert whole(x).item() == 0.0
    part = RowParallelLinear(2, 1, INT8, Group(1, 2))
    part.load(Stored(w, scale))
    assert part(x[:, 1:]).item() == pytest.approx(0.381)


@pytest.mark.parametrize(
    "layer",
    [
        Linear(2, 4, INT8),
        ColumnParallelLinear(2, 4, INT8, Group(0, 2)),
        RowParallelLinear(2, 4, INT8, Group(0, 2)),
        VocabularyParallel(4, 2, torch.float32, Group(0, 2)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_weight_of_another_shape_is_refused(layer):
    message = r"the file holds shape \[2, 4\], the model needs \[4, 2\]"  # a transposed weight
    with pytest.raises(ValueError, match=message):
        layer.load(Stored(CODES.t(), SCALES))


def test_a_cast_leaves_codes_and_scales():
    layer = Linear(2, 4, INT8)
    layer.load(Stored(CODES, SCALES + 0.001))
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.int8
    assert torch.equal(layer.weight_scale, SCALES + 0.001)
    assert Linear(2, 4, FLOAT).to(torch.bfloat16).weight.dtype == torch.bfloat16


def test_the_accumulator_is_passed_on(monkeypatch):
    asked = []
    monkeypatch.setattr("moe_int8.parallel.linear.w8a8_linear", lambda *_, accumulator: asked.append(accumulator))
    for accumulator in ("int32", "fp32"):
        Linear(2, 4, WeightFormat(torch.float32, True, accumulator))(torch.zeros(1, 2))
    assert asked == ["int32", "fp32"]


# vocabulary


class Gathering:
    """The group of the last rank, with the logits of its peers given."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        self.others = others

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([*self.others, x], dim=-1)


@pytest.mark.parametrize("vocab, size", [(10, 1), (10, 2), (10, 4), (10, 8), (3, 8)])
def test_embedding_partial_sums_are_the_embedding(vocab, size):
    weight = torch.randn(vocab, 6)
    ids = torch.arange(vocab)
    total = torch.zeros(vocab, 6)
    for rank in range(size):
        layer = VocabularyParallelEmbedding(vocab, 6, torch.float32, Group(rank, size))
        layer.load(Stored(weight))
        total += layer(ids)
    assert torch.equal(total, weight)  # one rank holds a token, the others add exact zeros


def test_a_broken_row_of_another_token_does_not_leak_into_the_sum():
    layer = VocabularyParallelEmbedding(4, 2, torch.float32, Group(0, 2))
    layer.load(Stored(torch.tensor([[float("nan")] * 2, [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])))
    assert layer(torch.tensor([1, 3])).tolist() == [[1.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("vocab, size", [(10, 4), (10, 8), (3, 8)])
def test_padding_of_the_vocabulary_never_wins(vocab, size):
    """All true logits are negative, so a padded row's zero would be the largest."""
    weight = -torch.rand(vocab, 6) - 0.1
    hidden = torch.rand(2, 6) + 0.1
    parts = [VocabularyParallelHead(vocab, 6, torch.float32, Group(rank, size)) for rank in range(size)]
    for part in parts:
        part.load(Stored(weight))
    logits = [F.linear(hidden, part.weight) for part in parts]
    last = parts[-1]
    assert last.stop - last.start < last.part  # padded
    last.group = Gathering(logits[:-1])
    out = last(hidden)
    assert out.shape == (2, vocab)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, F.linear(hidden, weight))
    assert (out < 0).all()


def test_logits_of_a_bf16_head_are_fp32():
    head = VocabularyParallelHead(5, 4, torch.bfloat16, Group())
    head.load(Stored(torch.randn(5, 4)))
    assert head(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.float32
