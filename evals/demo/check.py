"""How well a trained demo model does on its held-out sets, with no examples and with five in front of a question."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_int8.evals.demo.corpus import CHOICES, WORD_PROBLEMS
from moe_int8.evals.demo.questions import SUBJECTS
from moe_int8.evals.gsm8k import Gsm8k
from moe_int8.evals.in_process import Model, encode
from moe_int8.evals.mmlu import Mmlu
from moe_int8.evals.statistics import score
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.text import load_tokenizer
from moe_int8.models.deepseek.weights import load_model, open_model
from moe_int8.parallel import Groups

AT_A_TIME = 128
ANSWER_TOKENS = {"gsm8k": 512, "mmlu": 1}


def check(checkpoint: Path, held_out: Path, count: int, device: torch.device) -> list[dict[str, Any]]:
    """Greedy answers to the first `count` word problems and about as many four-choice questions, in BF16.

    Returns:
        For each set and number of shots: "set", "shots", "score", "stderr", "n"; and "parts", the same by number of
        calculations or by subject, with a "name".
    """
    groups = Groups()
    model = load_model(open_model(checkpoint), groups, device=device)
    tokenizer = load_tokenizer(checkpoint)
    greedy = SamplingParams.from_generation_config(checkpoint, temperature=0.0)
    rows = []
    for shots in (0, 5):
        for task in (
            Gsm8k(held_out / WORD_PROBLEMS, shots=shots, num_questions=count, chat=False),
            Mmlu(
                held_out / CHOICES,
                shots=shots,
                num_questions=max(count // len(SUBJECTS), 1),
                subjects=None,
                chat=False,
                generate=True,
            ),
        ):
            room = ANSWER_TOKENS[task.name]
            prompts = [
                encode(tokenizer, prompt, chat=False, room=room, context=model.config.max_position_embeddings)
                for prompt in task.prompts
            ]
            length = max(len(prompt.ids) for prompt in prompts) + room
            generator = Generator(model, min(AT_A_TIME, len(prompts)), length)
            answers = Model(generator, groups.tp, tokenizer, replace(greedy, max_new_tokens=room, stop=task.stop))
            records = [task.record(index, output) for index, output in enumerate(answers.outputs(prompts, 0))]
            names = [part_of(task, index) for index in range(len(records))]
            right = [bool(record["correct"]) for record in records]
            parts = [
                {"name": name, **score([r for r, own in zip(right, names, strict=True) if own == name])}
                for name in sorted(set(names))
            ]
            rows.append({"set": task.name, "shots": shots, **score(right), "parts": parts})
    return rows


def part_of(task: Gsm8k | Mmlu, index: int) -> str:
    """The subject of a four-choice question, and how many calculations a word problem takes."""
    return task.group(index) if isinstance(task, Mmlu) else f"{task.questions[index]['answer'].count('<<')} steps"
