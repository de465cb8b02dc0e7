"""Process groups and the layers that are split over them."""

from moe_int8.parallel.groups import Group, Groups, close_groups, init_groups, local_device
from moe_int8.parallel.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    WeightFormat,
    WeightSource,
)
from moe_int8.parallel.meeting import JOIN_TIMEOUT, MeetingError, meet, wait_for_first, world_size
from moe_int8.parallel.sharding import check_tp_size, legal_tp_sizes, shard
from moe_int8.parallel.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = [
    "JOIN_TIMEOUT",
    "ColumnParallelLinear",
    "Group",
    "Groups",
    "Linear",
    "MeetingError",
    "MergedColumnParallelLinear",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "WeightFormat",
    "WeightSource",
    "check_tp_size",
    "close_groups",
    "init_groups",
    "legal_tp_sizes",
    "local_device",
    "meet",
    "shard",
    "wait_for_first",
    "world_size",
]
