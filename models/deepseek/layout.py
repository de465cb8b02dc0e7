"""Which tensors a model has, from config.json alone: so that files and config are compared before anything is built."""

import re
from collections.abc import Callable, Iterator
from math import prod

import torch

from moe_int8.models.deepseek.checkpoint import MAX_ELEMENTS, Checkpoint, CheckpointError, Index
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.formats import QUANTIZED, SCALE_SUFFIX, projection_kind

MOST_MISSING = 100_000  # names that are collected before giving up; R1 has 47,000
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: DeepseekConfig) -> Shapes:
    """Name and shape of every tensor that the model needs, without scales, in the order of the layers.

    One by one: config.json may claim any number of layers.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", vocabulary
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", (config.hidden_size,)
        yield from _attention(f"{prefix}.self_attn", config)
        yield f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)
        if config.is_moe(index):
            yield from _moe(f"{prefix}.mlp", config)
        else:
            yield from _mlp(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
    yield "model.norm.weight", (config.hidden_size,)
    yield "lm_head.weight", vocabulary


def check_fits(checkpoint: Checkpoint, config: DeepseekConfig) -> int:
    """Check that the files hold the model that config.json describes: its tensors, in these shapes, and no others.

    Takes no longer than the files are, whatever sizes config.json claims; so a model that passes is no larger than
    its files, and may be built.

    Returns:
        how many tensors belong to multi-token-prediction layers, which the model does not use.

    Raises:
        CheckpointError: a tensor that no file holds, that the model does not have, or of a wrong shape or dtype.
    """

    def check(name: str, shape: tuple[int, ...]) -> str:
        _check_tensor(checkpoint, name, shape)
        return SCALE_SUFFIX.get(checkpoint.dtype(name), "")

    return _check_names(checkpoint, config, check)


def check_named(index: Index, config: DeepseekConfig) -> int:
    """`check_fits` where there are no files yet: the index names the tensors of the model, and no others."""
    suffix = SCALE_SUFFIX.get(QUANTIZED.get(index.named_format(), torch.bfloat16), "")

    def check(name: str, shape: tuple[int, ...]) -> str:
        if prod(shape) > MAX_ELEMENTS:
            raise CheckpointError(f"{index.folder}: {name} would have {prod(shape)} elements, no model's: refused")
        return suffix

    return _check_names(index, config, check)


def _check_names(index: Index, config: DeepseekConfig, check: Callable[[str, tuple[int, ...]], str]) -> int:
    """Check the names, and each tensor by `check`, which returns what the name of its scale ends in, if it has one."""
    allowed: set[str] = set()
    missing: list[str] = []
    for name, shape in tensor_shapes(config):
        if name in index:
            allowed |= {name, name + check(name, shape)}
        else:
            missing.append(name)
            if len(missing) == MOST_MISSING:
                break
    if missing:
        raise CheckpointError(
            f"{index.folder}: no file holds {_shortened(sorted(missing))}; the checkpoint is incomplete, or its "
            "config.json another model's"
        )
    first_mtp = config.num_hidden_layers
    mtp_layers = range(first_mtp, first_mtp + max(config.num_nextn_predict_layers, 1))
    others = [name for name in index.names() if name not in allowed]
    unknown = [name for name in others if not (match := _LAYER.match(name)) or int(match[1]) not in mtp_layers]
    if unknown:
        raise CheckpointError(f"{index.folder}: the files hold {_shortened(unknown)}, which this model does not have")
    return len(others)


def _attention(prefix: str, config: DeepseekConfig) -> Shapes:
    heads, hidden, kv_rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    if config.q_lora_rank is None:
        yield f"{prefix}.q_proj.weight", (heads * config.qk_head_dim, hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (config.q_lora_rank, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (config.q_lora_rank,)
        yield f"{prefix}.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (config.latent_dim, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (kv_rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), kv_rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * config.v_head_dim)


def _moe(prefix: str, config: DeepseekConfig) -> Shapes:
    hidden, inter = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}.gate.weight", (config.n_routed_experts, hidden)
    if config.topk_method == "noaux_tc":
        yield f"{prefix}.gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, inter)
    if config.n_shared_experts:
        yield from _mlp(f"{prefix}.shared_experts", hidden, config.n_shared_experts * inter)


def _mlp(prefix: str, hidden: int, inter: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inter, hidden)
    yield f"{prefix}.up_proj.weight", (inter, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inter)


def _check_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    where = f"{checkpoint.folder / checkpoint.file_of(name)}: {name}"
    if checkpoint.shape(name) != shape:
        raise CheckpointError(
            f"{where}: the file holds shape {list(checkpoint.shape(name))}, the model needs {list(shape)}"
        )
    dtype = checkpoint.dtype(name)
    if dtype in (torch.bfloat16, torch.float32):
        return
    # The converter makes BF16 of any other FP8 weight. INT8 is for projections alone: no norm, router, embedding or
    # lm_head is good with it, and what holds one so was not made for this model.
    if dtype is not QUANTIZED.get(checkpoint.format) or (dtype is torch.int8 and not projection_kind(name)):
        raise CheckpointError(f"{where} is stored as {dtype}, which is not supported: get it in bfloat16 or float32")


def _shortened(names: list[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    count = "very many" if len(names) == MOST_MISSING else len(names) - most
    more = f" and {count} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
