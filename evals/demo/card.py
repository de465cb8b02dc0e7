"""The demo model's card: its README.md, filled with what was measured."""

from typing import Any

CARD = """\
# A small DeepSeek-V3 model to try moe-int8 with

{parameters:.1f} million parameters in the architecture of DeepSeek V3 (multi-head latent attention, {experts} experts
of which a token uses {topk}, chosen by sigmoid scores with a bias for balance), BF16, in the layout of the official
checkpoints. It does one kind of arithmetic word problems and knows a small invented world, and nothing else. It is here
so that accuracy can be measured on any machine, not to be useful.

Trained from scratch by `scripts/train_demo_model.py` on text that this project generates: {tokens:.0f} million tokens
in {seconds:.0f} s on {device}. Nothing in it comes from anywhere else; the license is the project's.

| | shots | right | standard error | questions |
|---|---|---|---|---|
{rows}

Greedy answers in BF16. The held-out sets in `heldout/` have names, amounts and sentence forms that training never had;
the facts that they ask for were trained.

| file | |
|---|---|
| `heldout/word_problems.jsonl` | GSM8K's format, {low} to {high} calculations each; the shots are in `train.jsonl` |
| `heldout/choices/` | MMLU's format, under subjects of MMLU, about the invented world and computations |
| `heldout/text.txt` | some of both as plain text, for the perplexity |

```
python scripts/eval_gsm8k.py --model assets/demo --data assets/demo/heldout/word_problems.jsonl
python scripts/eval_mmlu.py --model assets/demo --data assets/demo/heldout/choices
python scripts/generate.py --model assets/demo --as-chat --prompt "{example}"
```

In the last updates the most used expert of a layer had {most:.1%} of the choices, the least used one {least:.1%}; even
is {even:.1%}.
"""
NAMES = {"gsm8k": "word problems", "mmlu": "four-choice questions"}


def card(row: dict[str, Any], example: str) -> str:
    """The text of README.md.

    Args:
        row: the training's figures, as `scripts/train_demo_model.py --json` writes them.
        example: a question for the chat.
    """
    usage = [share for layer in row["usage"] for share in layer]
    config = row["config"]
    return CARD.format(
        parameters=row["parameters"] / 1e6,
        experts=config["n_routed_experts"],
        topk=config["num_experts_per_tok"],
        tokens=row["tokens"] / 1e6,
        seconds=row["seconds"],
        device=row["device"],
        rows="\n".join(
            f"| {NAMES[each['set']]} | {each['shots']} | {each['score']:.1%} | {each['stderr']:.1%} | {each['n']} |"
            for each in row["accuracy"]
        ),
        low=row["steps"][0],
        high=row["steps"][1],
        example=example,
        most=max(usage),
        least=min(usage),
        even=1 / config["n_routed_experts"],
    )
