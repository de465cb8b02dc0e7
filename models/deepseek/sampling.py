"""From logits to token ids: temperature and top-p, exact sums, and one random stream per sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_int8.check import check_tensor
from moe_int8.models.deepseek.text import check_stops
from moe_int8.models.deepseek.untrusted import read_json, shown

FLOATS = (torch.float32, torch.float64)
# A row's largest probability weight becomes this integer. The weights of a vocabulary of up to 2^18 tokens then add up
# to at most 2^53, exact in int64 and in float64, so that no order of addition matters.
WEIGHT_ONE = 2**35
MAX_TEMPERATURE = 1e30  # logits are divided by it in fp32


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is continued.

    Attributes:
        temperature: 0 is greedy; at most MAX_TEMPERATURE.
        top_p: sample from the smallest set of most likely tokens whose probabilities add up to at least this.
        seed: with the sequence's index it fixes the random numbers of the sequence.
        max_new_tokens: end after so many tokens, at least 1.
        stop: texts that end the sequence; they are not part of the answer.
        ignore_eos: go on after an end-of-sequence token.
        eos_token_ids: the end-of-sequence tokens; empty if the checkpoint's generation_config.json names none.

    Raises:
        ValueError: a value is of a wrong type or out of range; names the field and the value.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {shown(self.temperature)}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {shown(self.top_p)}")
        if not _is_integer(self.seed):
            raise ValueError(f"seed must be a whole number, got {shown(self.seed)}")
        if not (_is_integer(self.max_new_tokens) and self.max_new_tokens >= 1):
            raise ValueError(f"max_new_tokens must be at least 1, got {shown(self.max_new_tokens)}")
        check_stops(self.stop)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        if not (isinstance(self.eos_token_ids, list | tuple) and all(map(_is_integer, self.eos_token_ids))):
            raise ValueError(f"eos_token_ids must be token ids, got {shown(self.eos_token_ids)}")

    @classmethod
    def from_generation_config(cls, source: str | Path | Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """The checkpoint's own defaults, and over them what the user asked for.

        Args:
            source: the checkpoint's folder, or the content of its generation_config.json. A folder without that file
                gives the defaults of this class. `do_sample: false` means temperature 0. Keys other than do_sample,
                temperature, top_p and eos_token_id are not used.
            overrides: fields of this class; None stands for "not given".

        Raises:
            ValueError: generation_config.json is no JSON object, or a value is out of range.
        """
        config = source if isinstance(source, Mapping) else _read_generation_config(Path(source))
        fields: dict[str, Any] = {key: config[key] for key in ("temperature", "top_p") if config.get(key) is not None}
        if config.get("do_sample") is False:
            fields["temperature"] = 0.0
        eos = config.get("eos_token_id")
        if eos is not None:
            fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        fields.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**fields)


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Pick one token per row; a row's token depends on nothing but its own row.

    The tokens, ordered by logit, descending, ties by the lowest index, have the weights w = exp((logit - max) /
    temperature) in fp32, cut to multiples of 2^-35, so that all sums are exact in any order and on any device. The
    smallest number of leading tokens that holds at least `top_p` of the sum is kept, and `uniform` times the kept sum
    falls on one of them. Nothing here waits for the device.

    Args:
        logits: [B, V] fp32; -inf excludes a token.
        temperature: [B] fp32 or fp64; 0 picks the largest logit.
        top_p: [B] fp32 or fp64, in (0, 1].
        uniform: [B] fp32 or fp64, in [0, 1).

    Returns:
        [B] int64 token ids. A row whose largest logit is not finite (a NaN or +inf among its logits, or all -inf) gives
        -1, which the caller must report as a failure of that sequence.
    """
    check_tensor("logits", logits, ("B", "V"), torch.float32)
    for name, x in {"temperature": temperature, "top_p": top_p, "uniform": uniform}.items():
        check_tensor(name, x, (logits.shape[0],), FLOATS, device=logits.device)
    greedy = (temperature.float() == 0)[:, None]
    scale = torch.where(greedy, 1.0, temperature.float()[:, None])
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # The largest is subtracted before the division: a tiny temperature must not make inf - inf.
    largest = logits.amax(dim=-1, keepdim=True)
    # A row with a NaN has arbitrary weights: the clamps keep its positions valid, and it ends as -1.
    weights = (torch.exp((ordered - largest) / scale) * WEIGHT_ONE).to(torch.int64)
    sums = weights.cumsum(dim=-1)
    needed = torch.ceil(top_p.double()[:, None] * sums[:, -1:]).to(torch.int64)
    last = (sums < needed).sum(dim=-1, keepdim=True).clamp_max(logits.shape[1] - 1)
    kept = sums.gather(1, last)
    target = (uniform.double()[:, None] * kept).to(torch.int64).minimum(kept - 1)
    position = (sums <= target).sum(dim=-1, keepdim=True).clamp_max(logits.shape[1] - 1)
    picked = order.gather(1, torch.where(greedy, 0, position))
    return torch.where(largest.isfinite(), picked, -1).squeeze(1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """`sample` at temperature 0, without sorting: [B, V] fp32 -> [B] int64, -1 for a row that has no finite maximum."""
    largest, token = logits.amax(dim=-1), logits.argmax(dim=-1)
    return torch.where(largest.isfinite(), token, -1)


class Sampler:
    """Samples for a set of sequences, each with its own parameters and random numbers.

    Sequence i draws from its own generator, seeded with (params[i].seed, i), one number per token; so its text is the
    same whichever sequences run beside it, and on every device (the numbers are drawn on the CPU).
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.params = tuple(params)
        self._generators = [_generator(p.seed, index) for index, p in enumerate(self.params)]

    def __call__(self, logits: torch.Tensor, sequences: Sequence[int] | None = None) -> torch.Tensor:
        """Pick the next token of some sequences.

        Args:
            logits: [B, V] fp32.
            sequences: the sequence that each row belongs to; None for all, in order.

        Returns:
            [B] int64 token ids, -1 where `sample` gives it.
        """
        sequences = range(len(self.params)) if sequences is None else sequences
        if logits.shape[0] != len(sequences):
            raise ValueError(f"logits must have one row per sequence, got {logits.shape[0]} for {len(sequences)}")
        params = [self.params[i] for i in sequences]
        if all(p.temperature == 0 for p in params):
            return argmax(logits)
        draws = torch.cat([torch.rand(1, generator=self._generators[i], dtype=torch.float64) for i in sequences])
        settings = torch.tensor([(p.temperature, p.top_p) for p in params], dtype=torch.float64)
        temperature, top_p, uniform = torch.stack([*settings.T, draws]).to(logits.device)
        return sample(logits, temperature, top_p, uniform)


def _generator(seed: int, index: int) -> torch.Generator:
    # A hash, since seed + index would give sequence 1 of seed 0 and sequence 0 of seed 1 the same numbers.
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _read_generation_config(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)
