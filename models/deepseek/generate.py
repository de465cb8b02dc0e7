"""Batched generation: prompts of any lengths in, tokens out.

Waiting prompts join as soon as a sequence has finished and its blocks are free. Their tokens are run through the model
in chunks (prefill), then every running sequence gains one token a step (decode). Rank 0 samples and says who has
finished; the others follow.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from moe_int8.models.deepseek.cache import BLOCK_SIZE, Batch, LatentCache, blocks_for
from moe_int8.models.deepseek.config import DeepseekConfig
from moe_int8.models.deepseek.model import DeepseekModel
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.models.deepseek.sampling import Sampler, SamplingParams
from moe_int8.models.deepseek.untrusted import shown

RUNNING, STOP, LENGTH = 0, 1, 2  # why a sequence ended, as the ranks tell each other
FINISH_REASONS = {STOP: "stop", LENGTH: "length"}
NOT_NUMBERS = "the model's logits are not numbers: the weights or their scales are broken"

# (index of the prompt, token) -> the text so far is complete (a stop string was seen); asked on rank 0 only
Watch = Callable[[int, int], bool]


@dataclass
class Completion:
    """What became of one prompt.

    Attributes:
        tokens: generated ids; if the model ended the text itself, the last one is its end token.
        finish_reason: "stop" (end token or stop string) or "length" (max_new_tokens or the context's end).
        token_times: when each token was there, in seconds of `time.perf_counter`.
    """

    tokens: list[int]
    finish_reason: str
    token_times: list[float] = field(default_factory=list, compare=False)


@dataclass
class Speed:
    """Tokens and seconds of a run."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        def rate(tokens: int, seconds: float) -> str:
            return f"{tokens} tokens in {seconds:.2f} s" + (f" ({tokens / seconds:.1f} tokens/s)" if seconds else "")

        return (
            f"prefill {rate(self.prefill_tokens, self.prefill_seconds)}, "
            f"decode {rate(self.decode_tokens, self.decode_seconds)}"
        )


@dataclass
class _Running:
    """A sequence in the batch: `tokens` is the prompt and what was generated, `cached` of them are in the cache."""

    index: int
    tokens: list[int]
    prompt_length: int
    blocks: list[int]
    cached: int = 0
    token_times: list[float] = field(default_factory=list)


@dataclass
class Generator:
    """A model with its cache.

    Attributes:
        max_batch: sequences at a time.
        max_model_len: tokens of a sequence, prompt and answer together.
        prefill_chunk: tokens in one prefill pass.
        speed: of all runs so far.
    """

    model: DeepseekModel
    max_batch: int
    max_model_len: int
    prefill_chunk: int = 2048
    speed: Speed = field(default_factory=Speed)

    def __post_init__(self) -> None:
        check_limits(
            self.model.config,
            max_batch=self.max_batch,
            max_model_len=self.max_model_len,
            prefill_chunk=self.prefill_chunk,
        )
        self.device = self.model.lm_head.weight.device
        self.cache = LatentCache(
            self.model.config,
            self.max_batch * blocks_for(self.max_model_len),
            self.model.precision.dtype,
            self.device,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        watch: Watch | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue every prompt; the completions come in the prompts' order. Called on all ranks with the same prompts.

        Args:
            prompts: token ids.
            watch: see `Watch`.
            progress: show a bar over the prompts' tokens while they are prefilled.

        Raises:
            ValueError: a prompt is empty, does not fit, or holds an id outside the vocabulary.
            FloatingPointError: the model's logits are not numbers.
        """
        check_prompts(self.model.config, prompts, self.max_model_len)
        sampler = Sampler([params] * len(prompts))
        done: dict[int, Completion] = {}
        waiting = list(range(len(prompts)))
        running: list[_Running] = []
        try:
            with progress_bar(
                total=sum(map(len, prompts)), desc="prefill", unit=" tokens", disable=not progress, leave=False
            ) as bar:
                while waiting or running:
                    joined = self._admit(waiting, len(running), prompts, params)
                    assert joined or running, "with nobody running the whole cache is free"
                    start = time.perf_counter()
                    if running:
                        self.speed.decode_tokens += len(running)
                        running = self._advance(running, self._decode(running), sampler, watch, done)
                    decoded = time.perf_counter()
                    if joined:
                        self.speed.prefill_tokens += sum(sequence.prompt_length for sequence in joined)
                        running += self._advance(joined, self._prefill(joined, bar), sampler, watch, done)
                    self.speed.decode_seconds += decoded - start
                    self.speed.prefill_seconds += time.perf_counter() - decoded
        finally:
            self.cache.give_back_all()  # after an error too, so that this object stays usable
        return [done[index] for index in range(len(prompts))]

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The logits after every token of one text: fp32 [T, vocab_size]. Called on all ranks.

        Raises:
            ValueError: the text is empty, longer than `max_model_len`, or holds an id outside the vocabulary.
        """
        check_prompts(self.model.config, [token_ids], self.max_model_len + 1)
        blocks = self.cache.take(blocks_for(len(token_ids)))
        assert blocks is not None, "no generation runs beside this, so the whole cache is free"
        sequence = _Running(0, list(token_ids), len(token_ids), blocks)
        starts = range(0, len(token_ids), self.prefill_chunk)
        spans = [range(start, min(start + self.prefill_chunk, len(token_ids))) for start in starts]
        try:
            return torch.cat([self.model.logits(self._forward([(sequence, span)], prefill=True)) for span in spans])
        finally:
            self.cache.give_back_all()

    def choice_logprobs(
        self, prompts: Sequence[Sequence[int]], choices: Sequence[int], *, shared: int = 0
    ) -> Iterator[torch.Tensor]:
        """How likely each of some tokens is to come next. Called on all ranks; nothing else may run until it ends.

        Args:
            prompts: token ids.
            choices: the tokens to judge.
            shared: how many tokens all prompts begin with alike. Their whole blocks are run once and read by all.

        Yields:
            Log-probabilities, fp32 [B, len(choices)], for `max_batch` prompts at a time, in order.

        Raises:
            ValueError: a prompt is empty, longer than `max_model_len`, or holds an id outside the vocabulary.
            FloatingPointError: the model's logits are not numbers.
        """
        check_prompts(self.model.config, prompts, self.max_model_len + 1)
        prefix = list(prompts[0][: shared // BLOCK_SIZE * BLOCK_SIZE])
        assert all(len(prompt) > len(prefix) and list(prompt[: len(prefix)]) == prefix for prompt in prompts)
        start = time.perf_counter()
        try:
            with progress_bar(disable=True) as bar:
                common = self.cache.take(blocks_for(len(prefix))) or []
                if prefix:
                    self._prefill([_Running(0, prefix, len(prefix), common)], bar)
                    self.speed.prefill_tokens += len(prefix)
                for first in range(0, len(prompts), self.max_batch):
                    sequences = []
                    for index, prompt in enumerate(prompts[first : first + self.max_batch]):
                        own = self.cache.take(blocks_for(len(prompt)) - len(common))
                        assert own is not None, "the cache holds max_batch sequences of max_model_len"
                        sequences.append(_Running(index, list(prompt), len(prompt), common + own, cached=len(prefix)))
                    logprobs = self._prefill(sequences, bar).log_softmax(dim=-1)[:, list(choices)]
                    if not logprobs.isfinite().all():
                        raise FloatingPointError(NOT_NUMBERS)
                    for sequence in sequences:
                        self.cache.give_back(sequence.blocks[len(common) :])
                        self.speed.prefill_tokens += sequence.prompt_length - len(prefix)
                    self.speed.prefill_seconds += time.perf_counter() - start
                    yield logprobs
                    start = time.perf_counter()
        finally:
            self.cache.give_back_all()

    def _admit(
        self, waiting: list[int], running: int, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[_Running]:
        """Take waiting prompts while there is a place in the batch and room in the cache for all their tokens."""
        joined: list[_Running] = []
        while waiting and running + len(joined) < self.max_batch:
            prompt = prompts[waiting[0]]
            blocks = self.cache.take(blocks_for(min(len(prompt) + params.max_new_tokens, self.max_model_len)))
            if blocks is None:
                break
            joined.append(_Running(waiting.pop(0), list(prompt), len(prompt), blocks))
        return joined

    def _prefill(self, sequences: list[_Running], bar: tqdm) -> torch.Tensor:
        """Run whole prompts in passes of at most `prefill_chunk` tokens; returns the logits after each, [B, V]."""
        last: dict[int, torch.Tensor] = {}
        pending = list(sequences)
        while pending:
            pieces: list[tuple[_Running, range]] = []
            room = self.prefill_chunk
            for sequence in pending:
                span = range(sequence.cached, min(sequence.prompt_length, sequence.cached + room))
                pieces.append((sequence, span))
                room -= len(span)
                if not room:
                    break
            hidden = self._forward(pieces, prefill=True)
            ends = torch.tensor([len(span) for _, span in pieces]).cumsum(0) - 1
            last |= {sequence.index: hidden[end] for (sequence, _), end in zip(pieces, ends.tolist(), strict=True)}
            bar.update(sum(len(span) for _, span in pieces))
            pending = [sequence for sequence in pending if sequence.cached < sequence.prompt_length]
        return self.model.logits(torch.stack([last[sequence.index] for sequence in sequences]))

    def _decode(self, sequences: list[_Running]) -> torch.Tensor:
        """Run each sequence's last token; returns the logits after it, [B, V]."""
        pieces = [(sequence, range(sequence.cached, len(sequence.tokens))) for sequence in sequences]
        return self.model.logits(self._forward(pieces, prefill=False))

    def _forward(self, pieces: list[tuple[_Running, range]], *, prefill: bool) -> torch.Tensor:
        """Run the given positions of some sequences; returns the normalised hidden states [T, hidden]."""
        token_ids = [token for sequence, span in pieces for token in sequence.tokens[span.start : span.stop]]
        positions = [position for _, span in pieces for position in span]
        slots = [
            sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for sequence, span in pieces
            for position in span
        ]
        width = max(blocks_for(span.stop) for _, span in pieces)
        tables = [(sequence.blocks + sequence.blocks[-1:] * width)[:width] for sequence, _ in pieces]

        def tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        batch = Batch(
            positions=tensor(positions),
            slots=tensor(slots),
            block_table=tensor(tables),
            lengths=tensor([span.stop for _, span in pieces]),
            spans=[span for _, span in pieces] if prefill else None,
        )
        hidden, _ = self.model(tensor(token_ids), batch, self.cache)
        for sequence, span in pieces:
            sequence.cached = span.stop
        return hidden

    def _advance(
        self,
        sequences: list[_Running],
        logits: torch.Tensor,
        sampler: Sampler,
        watch: Watch | None,
        done: dict[int, Completion],
    ) -> list[_Running]:
        """Give each sequence its next token; moves those that ended into `done` and returns the others."""
        news = torch.zeros(2, len(sequences), dtype=torch.int64, device=self.device)
        if self.model.group.rank == 0:
            tokens = sampler(logits, [sequence.index for sequence in sequences]).tolist()
            ends = [
                RUNNING if token < 0 else self._end(sequence, token, sampler, watch)
                for sequence, token in zip(sequences, tokens, strict=True)
            ]
            news = torch.tensor([tokens, ends], dtype=torch.int64, device=self.device)
        tokens, ends = self.model.group.broadcast(news).tolist()  # also waits for the device, so the times are true
        now = time.perf_counter()
        if min(tokens) < 0:
            raise FloatingPointError(NOT_NUMBERS)
        still = []
        for sequence, token, end in zip(sequences, tokens, ends, strict=True):
            sequence.tokens.append(token)
            sequence.token_times.append(now)
            if end == RUNNING:
                still.append(sequence)
                continue
            self.cache.give_back(sequence.blocks)
            generated = sequence.tokens[sequence.prompt_length :]
            done[sequence.index] = Completion(generated, FINISH_REASONS[end], sequence.token_times)
        return still

    def _end(self, sequence: _Running, token: int, sampler: Sampler, watch: Watch | None) -> int:
        """Whether `sequence` ends with this token, and why."""
        params = sampler.params[sequence.index]
        if token in params.eos_token_ids and not params.ignore_eos:
            return STOP
        if watch is not None and watch(sequence.index, token):
            return STOP
        length = len(sequence.tokens) + 1
        full = length - sequence.prompt_length >= params.max_new_tokens or length >= self.max_model_len
        return LENGTH if full else RUNNING


def check_limits(config: DeepseekConfig, *, max_batch: int, max_model_len: int, prefill_chunk: int) -> None:
    """Raise ValueError if a limit is below 1, or `max_model_len` beyond the model's context; names it."""
    for name, value in (("max_batch", max_batch), ("max_model_len", max_model_len), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len = {max_model_len} is beyond the model's context of {config.max_position_embeddings} tokens"
        )


def check_prompts(config: DeepseekConfig, prompts: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Raise ValueError if a prompt is empty, leaves no room for an answer, or holds an id outside the vocabulary."""
    for index, prompt in enumerate(prompts):
        if not (isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)):
            raise ValueError(f"prompt {index} must be a sequence of whole numbers, its token ids, got {shown(prompt)}")
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and leaves no room for an answer in a context of "
                f"{max_model_len}; raise --max-model-len (this model: up to {config.max_position_embeddings})"
            )
        if not (min(prompt) >= 0 and max(prompt) < config.vocab_size):
            raise ValueError(f"prompt {index} holds a token id outside 0..{config.vocab_size - 1}")
