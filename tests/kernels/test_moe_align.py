"""moe_align: the layout of C05 and, at random, its defining properties. It has no CPU path: interpreted or on a GPU."""

import pytest
import torch

from moe_int8.dispatch import INTERPRETED
from moe_int8.quantize import quantize_per_token_ref


@pytest.fixture
def align(device):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("no CPU path: run with TRITON_INTERPRET=1 or on a GPU")
    from moe_int8.kernels.moe_align import launch_moe_align

    def align(topk_ids, expert_map, num_experts, block_m):
        x = torch.randn(len(topk_ids), 40, dtype=torch.bfloat16, device=device)
        q, scale, alignment = launch_moe_align(x, None, topk_ids, expert_map, num_experts, block_m)
        expected_q, expected_scale = quantize_per_token_ref(x)
        assert torch.equal(q, expected_q)
        assert torch.equal(scale, expected_scale.view(-1))
        with_scales = launch_moe_align(q, scale, topk_ids, expert_map, num_experts, block_m)
        assert with_scales[0] is q
        assert with_scales[1] is scale
        assert used(with_scales[2]) == used(alignment)
        return alignment

    return align


def layout(topk_ids: torch.Tensor, num_experts: int, block_m: int, expert_map=None) -> tuple[list, list]:
    """The definition: (sorted slots with padding, the expert of each block)."""
    local = [i if 0 <= i < num_experts else -1 for i in topk_ids.flatten().tolist()]
    if expert_map is not None:
        local = [expert_map[i].item() if 0 <= i < len(expert_map) else -1 for i in topk_ids.flatten().tolist()]
    slots, blocks = [], []
    for expert in range(num_experts):
        mine = [slot for slot, e in enumerate(local) if e == expert]
        count = -(-len(mine) // block_m)
        slots += mine + [topk_ids.numel()] * (count * block_m - len(mine))
        blocks += [expert] * count
    return slots, blocks


def used(alignment) -> tuple[list, list]:
    """The part in use, as `layout` gives it."""
    rows = alignment.num_tokens_post_padded.item()
    block_m = alignment.sorted_token_ids.numel() // alignment.expert_ids.numel()
    return alignment.sorted_token_ids[:rows].tolist(), alignment.expert_ids[: rows // block_m].tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_c05_worked_example(align, device, dtype):
    topk_ids = torch.tensor([[2, 0], [2, 2], [3, 2], [3, 2]], dtype=dtype, device=device)
    alignment = align(topk_ids, None, 4, 4)
    assert alignment.num_tokens_post_padded.item() == 16
    assert used(alignment) == ([1, 8, 8, 8, 0, 2, 3, 5, 7, 8, 8, 8, 4, 6, 8, 8], [0, 2, 2, 3])


@pytest.mark.parametrize(
    "M, topk, E, block_m", [(1, 8, 256, 16), (300, 8, 7, 16), (3000, 6, 5, 16), (200, 6, 3, 64), (5, 1, 1, 16)]
)
def test_matches_definition(align, device, M, topk, E, block_m):
    topk_ids = torch.randint(-2, E + 2, (M, topk), dtype=torch.int32, device=device)  # some ids name no expert
    assert used(align(topk_ids, None, E, block_m)) == layout(topk_ids, E, block_m)


def test_expert_map_keeps_only_local_experts(align, device):
    expert_map = torch.tensor([-1, 1, -1, 0, -1, 9], dtype=torch.int32, device=device)  # 9: no such local expert
    topk_ids = torch.randint(-1, 7, (40, 4), dtype=torch.int64, device=device)
    expected = layout(topk_ids, 2, 16, expert_map)
    assert used(align(topk_ids, expert_map, 2, 16)) == expected
    assert set(expected[1]) == {0, 1}


def test_nothing_local_leaves_no_block(align, device):
    topk_ids = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    assert align(topk_ids, None, 4, 16).num_tokens_post_padded.item() == 0


def test_every_block_fits_when_each_expert_has_one_slot(align, device):
    topk_ids = torch.arange(24, dtype=torch.int32, device=device).view(3, 8)
    alignment = align(topk_ids, None, 24, 16)
    assert alignment.num_tokens_post_padded.item() == alignment.sorted_token_ids.numel() == 24 * 16
    assert used(alignment) == layout(topk_ids, 24, 16)
