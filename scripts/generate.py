"""Generate text with a DeepSeek V2/V3/R1 checkpoint, on one process or, under torchrun, on many.

Prompts come from --prompt (several times), from a file (--prompts-file: one a line, or JSON lines with "prompt"), or
from a conversation (--chat). The checkpoint's generation_config.json gives the sampling defaults.

Examples:
  python scripts/generate.py --model R1-INT8 --prompt "The capital of France is"
  torchrun --nproc-per-node 8 scripts/generate.py --model R1-INT8 --chat
  torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr 10.0.0.1 scripts/generate.py \\
      --model R1-INT8 --prompts-file prompts.txt --json answers.json
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_int8.models.deepseek.fingerprint import fingerprint
from moe_int8.models.deepseek.generate import Completion, Generator
from moe_int8.models.deepseek.memory import explained_out_of_memory
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.start import start_generator
from moe_int8.models.deepseek.text import (
    Detokenizer,
    StopStrings,
    encode_chat,
    encode_prompt,
    load_tokenizer,
    read_prompts,
)
from moe_int8.models.deepseek.weights import open_model
from moe_int8.parallel import (
    JOIN_TIMEOUT,
    Group,
    check_tp_size,
    close_groups,
    init_groups,
    local_device,
    meet,
    wait_for_first,
    world_size,
)
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors, options, packages, say, versions

DEFAULT_MAX_BATCH = 32
DEFAULT_MAX_NEW_TOKENS = 256
CHAT_MODEL_LEN = 8192  # tokens of a whole conversation, unless --max-model-len says otherwise


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the checkpoint: INT8, BF16 or FP32 (convert FP8 first)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="a prompt a line; .jsonl: with a key 'prompt'"
    )
    source.add_argument("--chat", action="store_true", help="a conversation: a message a line, an empty one ends it")
    add("--as-chat", action="store_true", help="put each prompt through the chat template as a user's message")
    add("--system", metavar="TEXT", help="system message of a chat")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to run on")
    add("--dtype", choices=["auto", "int8", "bf16", "fp32"], default="auto", help="of the weights; auto: as the files")
    add("--accumulator", choices=["int32", "fp32"], default="int32", help="of the int8 GEMMs; int32 is exact")
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"in each answer; without it: {DEFAULT_MAX_NEW_TOKENS}, in a chat what its context has left",
    )
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer; without it: what is needed")
    add("--max-batch", type=int, metavar="N", help=f"sequences at a time; without it: all, up to {DEFAULT_MAX_BATCH}")
    add("--prefill-chunk", type=int, default=2048, metavar="N", help="prompt tokens in one pass")
    add("--temperature", type=float, metavar="T", help="0 is greedy; without it: as generation_config.json says, or 0")
    add("--top-p", type=float, metavar="P", help="without it: as generation_config.json says, or 1")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers")
    add("--stop", action="append", metavar="TEXT", help="end an answer before this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on after the model's end token")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="how long a rank waits for another")
    add("--join-timeout", type=float, default=JOIN_TIMEOUT, metavar="SECONDS", help="how long ranks may take to meet")
    add("--json", type=Path, metavar="FILE", help="also write prompts, answers and speed here")
    args = parser.parse_args(argv)
    if args.max_new_tokens is None:
        args.max_new_tokens = (args.max_model_len or CHAT_MODEL_LEN) if args.chat else DEFAULT_MAX_NEW_TOKENS
    if args.system and not (args.chat or args.as_chat):
        parser.error("--system needs --chat or --as-chat")
    if args.json and args.chat:
        parser.error("--json does not go with --chat")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json {args.json} cannot be written: its folder is missing, or it is one")
    return args


class Answers:
    """The texts as they grow, on rank 0; `show` prints each piece at once, which suits a single prompt."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], count: int, show: bool) -> None:
        self.streams = [(Detokenizer(tokenizer), StopStrings(stops)) for _ in range(count)]
        self.texts = [""] * count
        self.show = show

    def watch(self, index: int, token: int) -> bool:
        """Take a token; True once a stop string was seen."""
        detokenizer, stops = self.streams[index]
        self._grow(index, stops.add(detokenizer.add(token)))
        return stops.stopped

    def finish(self) -> list[str]:
        """The whole texts."""
        for index, (detokenizer, stops) in enumerate(self.streams):
            self._grow(index, stops.add(detokenizer.flush()) + stops.flush())
        return self.texts

    def _grow(self, index: int, text: str) -> None:
        self.texts[index] += text
        if self.show:
            print(text, end="", flush=True)


@dataclass
class Session:
    """What stays the same from prompt to prompt. `tokenizer` is there on rank 0 only."""

    generator: Generator
    group: Group
    params: SamplingParams
    tokenizer: Any

    def answer(self, prompts: list[list[int]], show: bool) -> tuple[list[str], list[Completion]]:
        """Generate for token ids that all ranks hold; the texts are there on rank 0 only."""
        first = self.group.rank == 0
        answers = Answers(self.tokenizer, self.params.stop, len(prompts), show) if first else None
        completions = self.generator.generate(
            prompts, self.params, watch=answers.watch if answers else None, progress=first and sys.stderr.isatty()
        )
        return (answers.finish() if answers else []), completions

    def chat(self, system: str | None) -> None:
        """Read messages on rank 0 and answer them until an empty one."""
        messages = [{"role": "system", "content": system}] if system else []
        about = len(messages)  # what stays when the conversation begins anew
        while True:
            ids = self.next_turn(messages, about) if self.group.rank == 0 else None
            wait_for_first()  # a user may think for longer than a collective waits
            ids = self.group.broadcast_object(ids)
            if ids is None:
                return
            texts, completions = self.answer([ids], show=True)
            if texts:
                print(cut_note(completions[0]))
                messages.append({"role": "assistant", "content": texts[0]})

    def next_turn(self, messages: list[dict[str, str]], about: int) -> list[int] | None:
        """Add the user's next message and return the conversation's tokens; None if there is none.

        A conversation that has no room left loses all turns behind its first `about` messages.
        """
        limit = self.generator.max_model_len
        while text := read_message():
            messages.append({"role": "user", "content": text})
            ids = encode_chat(self.tokenizer, messages)
            if len(ids) >= limit and len(messages) > about + 1:
                print(
                    f"the conversation has outgrown its {limit} tokens (--max-model-len): it begins anew with this "
                    "message",
                    file=sys.stderr,
                )
                del messages[about:-1]
                ids = encode_chat(self.tokenizer, messages)
            if len(ids) < limit:
                return ids
            print(
                f"the message takes {len(ids)} of {limit} tokens (--max-model-len) and leaves no room for an answer: "
                "send a shorter one",
                file=sys.stderr,
            )
            messages.pop()
        return None


def read_message() -> str:
    """The user's next message; empty at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def cut_note(completion: Completion) -> str:
    """What to print behind an answer that did not end by itself."""
    return "" if completion.finish_reason == "stop" else f" [cut: {completion.finish_reason}]"


def run(args: argparse.Namespace) -> None:
    """Load and generate, as the command line says. Everything that can be checked before loading is."""
    meet(args.join_timeout)
    first = first_rank()

    if first:
        say(versions())
    files = open_model(args.model, dtype=args.dtype, accumulator=args.accumulator)
    config = files.config
    check_tp_size(world_size(), config.sharded_dimensions())
    overrides = {name: getattr(args, name) for name in ("temperature", "top_p", "seed", "max_new_tokens")}
    params = SamplingParams.from_generation_config(
        args.model, **overrides, stop=tuple(args.stop or ()), ignore_eos=args.ignore_eos
    )
    tokenizer = load_tokenizer(args.model) if first else None
    texts: list[str] = []
    prompts: list[list[int]] = []
    if tokenizer is not None and not args.chat:
        texts = args.prompt if args.prompts_file is None else read_prompts(args.prompts_file)
        system = [{"role": "system", "content": args.system}] if args.system else []
        prompts = [
            encode_chat(tokenizer, [*system, {"role": "user", "content": text}])
            if args.as_chat
            else encode_prompt(tokenizer, text)
            for text in texts
        ]
    device = local_device(args.device)
    settings = options(args, but=("model", "json", "join_timeout")) | asdict(params) | fingerprint(files) | packages()
    groups = init_groups(device, args.timeout, settings)
    prompts = groups.tp.broadcast_object(prompts)

    needed = CHAT_MODEL_LEN if args.chat else max(map(len, prompts)) + params.max_new_tokens
    max_model_len = min(needed, config.max_position_embeddings) if args.max_model_len is None else args.max_model_len
    max_batch = min(max(len(prompts), 1), DEFAULT_MAX_BATCH) if args.max_batch is None else args.max_batch
    limits = {"max_batch": max_batch, "max_model_len": max_model_len, "prefill_chunk": args.prefill_chunk}
    session = Session(start_generator(files, groups, device, prompts=prompts, **limits), groups.tp, params, tokenizer)
    if args.chat:
        say("an empty line ends the chat")
        session.chat(args.system)
    else:
        answers, completions = session.answer(prompts, show=len(prompts) == 1)
        close_groups()  # all ranks are done: from here on none can fail and cut short what is written
        if first:
            report(args, texts, answers, completions, session.generator)
    say(str(session.generator.speed))


def report(
    args: argparse.Namespace,
    prompts: list[str],
    answers: list[str],
    completions: list[Completion],
    generator: Generator,
) -> None:
    """Print the answers (a single one was streamed already) and write --json."""
    if len(prompts) == 1:
        print(cut_note(completions[0]))
    else:
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            print(f"--- {index}: {prompt}\n{answer}{cut_note(completions[index])}")
    if args.json:
        rows = [
            {
                "prompt": prompt,
                "text": answer,
                "token_ids": completion.tokens,
                "finish_reason": completion.finish_reason,
            }
            for prompt, answer, completion in zip(prompts, answers, completions, strict=True)
        ]
        args.json.write_text(json.dumps({"answers": rows, "speed": asdict(generator.speed)}, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with one_line_errors(), explained_out_of_memory():
        run(args)


if __name__ == "__main__":
    main()
