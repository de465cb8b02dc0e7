"""The model in this process, alone or under torchrun: rank 0 has the questions, all ranks compute."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_int8.evals.answers import THINK
from moe_int8.evals.prompts import Output, Prompt
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.text import Detokenizer, StopStrings, encode_chat, encode_prompt
from moe_int8.parallel import Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids, and what they are without.

    Attributes:
        dropped: shots left out in front.
        thinking: the chat template has opened a think block.
    """

    ids: list[int]
    dropped: int
    thinking: bool


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, chat: bool, room: int, context: int) -> Encoded:
    """Token ids of a prompt, without as many shots as `room` tokens for an answer need in `context`.

    A prompt that does not even fit without shots is returned as it is.
    """
    for dropped in range(len(prompt.shots) + 1):
        if chat:
            ids = encode_chat(tokenizer, prompt.messages(dropped))
        else:
            ids = encode_prompt(tokenizer, prompt.text(dropped))
        if len(ids) + room <= context:
            break
    end = str(tokenizer.decode(ids[-8:])) if chat else ""  # "<think>" and white space are fewer tokens
    return Encoded(ids, dropped, end.rstrip().endswith(THINK))


def choice_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, choices: Sequence[str]) -> list[int]:
    """The token that each choice is when it follows the prompt.

    Raises:
        ValueError: a choice is more than one token, or changes those before it: there is no one token to score.
    """
    before = encode_prompt(tokenizer, prompt)
    found = []
    for choice in choices:
        after = encode_prompt(tokenizer, prompt + choice)
        if after[:-1] != before:
            raise ValueError(
                f"the tokenizer makes no token of its own of {choice!r} behind a question, so there is none to score; "
                "let the model write its answer: --generate"
            )
        found.append(after[-1])
    return found


def common_length(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts begin with alike; each has at least one more."""
    first, last = min(prompts), max(prompts)
    alike = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return min(alike, min(map(len, prompts)) - 1)


class Texts:
    """The texts as they grow, on rank 0, cut at a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], count: int) -> None:
        self.texts = [""] * count
        self._streams = [(Detokenizer(tokenizer), StopStrings(stop)) for _ in range(count)]

    def watch(self, index: int, token: int) -> bool:
        """Take a token; True once a stop string was seen."""
        detokenizer, stops = self._streams[index]
        self.texts[index] += stops.add(detokenizer.add(token))
        return stops.stopped

    def finish(self) -> list[str]:
        """The whole texts."""
        for index, (detokenizer, stops) in enumerate(self._streams):
            self.texts[index] += stops.add(detokenizer.flush()) + stops.flush()
        return self.texts


@dataclass
class Model:
    """A loaded model that answers batches; called on all ranks, with the same arguments.

    Attributes:
        tokenizer: there on rank 0 only.
        params: of the generated answers.
    """

    generator: Generator
    group: Group
    tokenizer: Any
    params: SamplingParams

    def outputs(self, prompts: Sequence[Encoded], first_index: int) -> list[Output]:
        """What the model writes to each prompt; empty on all ranks but the first.

        `first_index`, of the first question, gives each batch its own random numbers.
        """
        ids = [prompt.ids for prompt in prompts]
        params = replace(self.params, seed=self.params.seed + first_index)
        if self.group.rank:
            self.generator.generate(ids, params)
            return []
        texts = Texts(self.tokenizer, params.stop, len(ids))
        completions = self.generator.generate(ids, params, watch=texts.watch)
        return [
            Output(text, done.finish_reason, len(prompt.ids), len(done.tokens), prompt.dropped, prompt.thinking)
            for prompt, text, done in zip(prompts, texts.finish(), completions, strict=True)
        ]

    def choices(self, prompts: Sequence[Encoded], choices: Sequence[int], shared: int) -> Iterator[list[Output]]:
        """The log-probabilities of the choices behind each prompt, by batch; `shared` as in `Generator`."""
        ids = [prompt.ids for prompt in prompts]
        start = 0
        for logprobs in self.generator.choice_logprobs(ids, choices, shared=shared):
            batch = prompts[start : start + len(logprobs)]
            start += len(batch)
            yield [
                Output("", "stop", len(prompt.ids), 0, prompt.dropped, logprobs=tuple(row))
                for prompt, row in zip(batch, logprobs.tolist(), strict=True)
            ]


@dataclass(frozen=True)
class Job:
    """Questions that the ranks work on before they hear of the next.

    Attributes:
        shared: how many tokens all prompts begin with alike; 0 if answers are generated.
    """

    indices: list[int]
    prompts: list[Encoded]
    shared: int = 0


def plan(
    prompts: Sequence[Encoded], groups: Sequence[str], done: Container[int], *, parallel: int, score: bool
) -> list[Job]:
    """The jobs that are left. Batches are fixed by the questions' indices: one that is not done whole is run whole, so
    that an interrupted run computes what an uninterrupted one does.

    Args:
        prompts, groups: of each question; a group's prompts begin alike.
        done: the questions that have their record.
        parallel: size of a batch.
        score: a job is a group, for its beginning is run once; otherwise it is a batch.
    """
    by_group: dict[tuple[str, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_group.setdefault((groups[index], prompt.dropped) if score else ("", 0), []).append(index)
    jobs = []
    for members in by_group.values():
        batches = [members[start : start + parallel] for start in range(0, len(members), parallel)]
        left = [batch for batch in batches if not all(index in done for index in batch)]
        if score:
            left = [[index for batch in left for index in batch]] if left else []
        shared = common_length([prompts[index].ids for index in members]) if score else 0
        jobs += [Job(indices, [prompts[index] for index in indices], shared) for indices in left]
    return jobs
