"""From an opened checkpoint to a generator, as every script does it: what can be checked before loading is."""

from collections.abc import Sequence

import torch

from moe_int8.models.deepseek.generate import Generator, check_limits, check_prompts
from moe_int8.models.deepseek.memory import MemoryPlan
from moe_int8.models.deepseek.weights import ModelFiles, load_model
from moe_int8.parallel import Groups
from moe_int8.parallel.launch import say


def start_generator(
    files: ModelFiles,
    groups: Groups,
    device: torch.device,
    *,
    max_batch: int,
    max_model_len: int,
    prefill_chunk: int,
    prompts: Sequence[Sequence[int]] = (),
) -> Generator:
    """Say what memory it takes, load the model and set it up for `max_batch` sequences of up to `max_model_len` tokens.

    Args:
        prompts: token ids that are known to come.

    Raises:
        CheckpointError: as `load_model`.
        ValueError: a limit is out of range, a prompt does not fit it, or the model not into the device's memory; says
            what to lower.
    """
    check_limits(files.config, max_batch=max_batch, max_model_len=max_model_len, prefill_chunk=prefill_chunk)
    check_prompts(files.config, prompts, max_model_len)
    plan = MemoryPlan.of(
        files.config,
        files.precision,
        tp_size=groups.tp.size,
        max_batch=max_batch,
        max_model_len=max_model_len,
        device=device,
    )
    say(str(plan))
    plan.check()
    return Generator(load_model(files, groups, device=device, say=say), max_batch, max_model_len, prefill_chunk)
