"""What a rank needs is known before it is taken, and is what it then takes."""

import pytest
import torch
from tiny import V3

from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.memory import MemoryPlan, weight_bytes
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.precision import Precision
from moe_int8.parallel import Group, Groups

CONFIG = DeepseekConfig.from_dict(V3)
CPU = torch.device("cpu")


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("int8", [True, False])
def test_weights_and_cache_are_what_the_plan_says(int8, tp_size):
    precision = Precision(torch.bfloat16, lambda name: int8)
    model = DeepseekModel(CONFIG, precision, Groups(tp=Group(0, tp_size)), "cpu")
    generator = Generator(model, max_batch=3, max_model_len=70)  # two blocks a sequence, the second hardly used
    plan = MemoryPlan.of(CONFIG, precision, tp_size=tp_size, max_batch=3, max_model_len=70, device=CPU)
    assert plan.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.cache == generator.cache.pool.nbytes
    assert plan.cache_per_token * 64 * 2 * 3 == plan.cache


def test_int8_halves_the_projections_and_ranks_share_them():
    sizes = [weight_bytes(CONFIG, Precision(torch.bfloat16, lambda _, i=int8: i), 1) for int8 in (True, False)]
    assert 0.5 < sizes[0] / sizes[1] < 0.75  # embedding, head, norms and router stay as they are
    quarter = weight_bytes(CONFIG, Precision(torch.bfloat16, lambda _: False), 4)
    assert 0.25 < quarter / sizes[1] < 0.5  # q_a, kv_a, norms and router are on every rank


def test_what_does_not_fit_is_refused_with_what_to_lower():
    fits, too_much = (
        MemoryPlan(weights=10**9, cache=10**9, cache_per_token=1, free=free) for free in (3 * 10**9, 10**9)
    )
    fits.check()
    with pytest.raises(
        ValueError, match=r"out of memory.*left -1.000 of 1.000 GB.*Lower --max-batch or --max-model-len"
    ):
        too_much.check()


def test_a_plan_on_a_cpu_knows_the_memory_of_the_machine():
    plan = MemoryPlan.of(
        CONFIG, Precision(torch.bfloat16, lambda _: True), tp_size=1, max_batch=2 * 10**9, max_model_len=64, device=CPU
    )
    with pytest.raises(ValueError, match="out of memory"):
        plan.check()
