import pytest

from moe_int8.parallel.sharding import check_tp_size, legal_tp_sizes, shard

V3 = {"num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048}
V2_LITE = {"num_attention_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408}


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16, 32])
def test_c55_the_official_sizes_split_v3(tp_size):
    check_tp_size(tp_size, V3)


@pytest.mark.parametrize("tp_size", [3, 24])
def test_c55_other_sizes_are_refused_with_the_dimension(tp_size):
    message = f"size {tp_size} does not divide num_attention_heads = 128; use one of 1, 2, 4, 8, 16, 32$"
    with pytest.raises(ValueError, match=message):
        check_tp_size(tp_size, V3)


@pytest.mark.parametrize("tp_size", [64, 33, 0, -1])
def test_c55_beyond_the_largest_size(tp_size):
    with pytest.raises(ValueError, match=f"size {tp_size} is not supported: the largest is 32"):
        check_tp_size(tp_size, V3)


def test_every_dimension_counts():
    assert legal_tp_sizes(V3) == [1, 2, 4, 8, 16, 32]
    assert legal_tp_sizes(V2_LITE) == [1, 2, 4, 8, 16]
    with pytest.raises(ValueError, match="size 16 does not divide moe_intermediate_size = 1400"):
        check_tp_size(16, V3 | {"moe_intermediate_size": 1400})
    assert legal_tp_sizes({"num_attention_heads": 6, "intermediate_size": 9}) == [1, 3]


@pytest.mark.parametrize("world", [1, 2, 8, 32])
def test_shards_are_equal_disjoint_and_complete(world):
    rows = [list(range(18432))[shard(18432, rank, world)] for rank in range(world)]
    assert [row for part in rows for row in part] == list(range(18432))
    assert {len(part) for part in rows} == {18432 // world}


def test_a_dimension_that_does_not_split_is_an_error_in_the_caller():
    with pytest.raises(AssertionError, match="10 does not split over 4 ranks"):
        shard(10, 0, 4)
