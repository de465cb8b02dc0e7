"""Random weights in place of a checkpoint's: a model of any size can be timed and compared without its files."""

import torch

from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.numerics import CODE_MAX

UNIFORM_CODE_STD = CODE_MAX / 3**0.5  # of codes drawn evenly from -127..127


def fill_randomly(model: DeepseekModel, seed: int = 0) -> None:
    """Give every parameter random values of a size that keeps activations near one: weights have a standard deviation
    of K^-0.5, norms are one, the router's logits spread by about one.

    Args:
        seed: the same seed gives the same weights on one device.
    """
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        data = parameter.data
        if data.dtype == torch.int8:
            data.random_(-CODE_MAX, CODE_MAX + 1, generator=generator)
            scale = model.get_parameter(name + "_scale").data
            scale.uniform_(0.5, 1.5, generator=generator).mul_(data.shape[-1] ** -0.5 / UNIFORM_CODE_STD)
        elif name.endswith("_scale"):
            continue  # filled with its weight
        elif name.endswith("e_score_correction_bias"):
            data.normal_(0, 0.1, generator=generator)
        elif data.ndim == 1:
            data.fill_(1)
        elif name == "embed_tokens.weight":
            data.normal_(generator=generator)
        else:
            data.normal_(0, data.shape[-1] ** -0.5, generator=generator)
