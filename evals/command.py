"""The command line that both evaluations share, and the run behind it."""

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_int8.evals.in_process import Encoded, Job, Model, choice_tokens, encode, plan
from moe_int8.evals.records import Records
from moe_int8.evals.report import Run, Task
from moe_int8.evals.server import Server
from moe_int8.models.deepseek.fingerprint import fingerprint
from moe_int8.models.deepseek.generate import check_prompts
from moe_int8.models.deepseek.memory import WHAT_TO_LOWER, explained_out_of_memory
from moe_int8.models.deepseek.progress import progress_bar
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.start import start_generator
from moe_int8.models.deepseek.text import load_tokenizer
from moe_int8.models.deepseek.weights import open_model
from moe_int8.parallel import (
    JOIN_TIMEOUT,
    check_tp_size,
    close_groups,
    init_groups,
    local_device,
    meet,
    world_size,
)
from moe_int8.parallel.launch import ArgumentParser, first_rank, one_line_errors, options, packages, say, versions

Load = Callable[[argparse.Namespace], Task]

NOT_COMPARED = ("data", "output", "timeout", "join_timeout")  # they do not change what is computed
IN_PROCESS = ("device", "dtype", "accumulator", "max_model_len", "prefill_chunk")


def add_options(parser: ArgumentParser) -> None:
    """The options of every evaluation."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="folder of the checkpoint; with --base-url a name, without it its first model")
    add("--base-url", metavar="URL", help="ask an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1")
    add("--shots", type=int, default=5, metavar="N", help="examples in front of each question")
    add("--style", choices=["completion", "chat"], default="completion", help="a text to continue, or a conversation")
    add(
        "--thinking", action="store_true", help="with --base-url: the chat template opens the think block, as R1's does"
    )
    add("--parallel", type=int, default=32, metavar="N", help="questions at a time")
    add("--max-new-tokens", type=int, metavar="N", help="in an answer; without it: enough for the style")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="share of the probability to sample from")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="to run on")
    add("--dtype", choices=["auto", "int8", "bf16", "fp32"], default="auto", help="of the weights; auto: as the files")
    add("--accumulator", choices=["int32", "fp32"], default="int32", help="of the int8 GEMMs; int32 is exact")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer; without it: what is needed")
    add("--prefill-chunk", type=int, default=2048, metavar="N", help="prompt tokens in one pass")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="how long to wait for the server, or a rank")
    add("--join-timeout", type=float, default=JOIN_TIMEOUT, metavar="SECONDS", help="how long ranks may take to meet")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the result here; an interrupted run goes on from FILE.partial",
    )


def parse(
    parser: ArgumentParser, argv: list[str] | None, *, answer_tokens: int, chat_tokens: int
) -> argparse.Namespace:
    """The command line, checked; `answer_tokens` and `chat_tokens` are --max-new-tokens where it is not given."""
    args = parser.parse_args(argv)
    if args.max_new_tokens is None:
        args.max_new_tokens = chat_tokens if args.style == "chat" else answer_tokens
    for name, least in (("shots", 0), ("num_questions", 1), ("parallel", 1), ("max_new_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more, got {value}")
    if args.base_url is None and args.model is None:
        parser.error("name a checkpoint (--model FOLDER) or a server (--base-url URL)")
    if args.base_url is not None and not args.base_url.startswith(("http://", "https://")):
        parser.error(f"--base-url must begin with http:// or https://, got {args.base_url}")
    if args.base_url is not None and world_size() > 1:
        parser.error("--base-url needs no torchrun: one process asks the server")
    if args.thinking and not (args.base_url and args.style == "chat"):
        parser.error("--thinking goes with --base-url and --style chat")
    if args.output and (args.output.is_dir() or not args.output.parent.is_dir()):
        parser.error(f"--output {args.output} cannot be written: its folder is missing, or it is one")
    return args


def evaluate(args: argparse.Namespace, load: Load) -> None:
    """Run the evaluation that the command line asks for; `load` reads the questions, on rank 0."""
    with one_line_errors(), explained_out_of_memory(WHAT_TO_LOWER.replace("--max-batch", "--parallel")):
        summary = (_in_process if args.base_url is None else _ask_server)(args, load)
        if summary and summary["failed"]:
            again = " run the same command again to ask them once more" if args.output else ""
            raise ValueError(
                f"{summary['failed']} of {summary['n']} requests failed and count as wrong; the first: "
                f"{summary['first_error']}.{again}"
            )


def _settings(args: argparse.Namespace, task: Task, but: tuple[str, ...], model: dict[str, Any]) -> dict[str, Any]:
    """What the result depends on: a run that continues another must have the same."""
    questions = hashlib.sha256(repr((task.prompts, task.questions)).encode()).hexdigest()[:12]
    return options(args, but=(*NOT_COMPARED, *but)) | {"task": task.name, "questions": questions} | model


def _ask_server(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    params = SamplingParams(args.temperature, args.top_p, args.seed, args.max_new_tokens)
    task = load(args)
    sampling: dict[str, Any] = {name: getattr(params, name) for name in ("temperature", "top_p", "seed")}
    sampling["max_tokens"] = params.max_new_tokens
    chat = args.style == "chat"
    if not chat:
        sampling["stop"] = list(task.stop)
    server = Server(args.base_url, chat, args.thinking, sampling, args.timeout)
    model = args.model or server.first_model()
    settings = _settings(args, task, (*IN_PROCESS, "parallel"), {"--model": model})
    run = Run(task, Records(args.output, settings))
    left = [index for index in range(len(task.prompts)) if index not in run.records.done]
    for index, output in server.outputs(model, task.prompts, left, args.parallel):
        run.take([index], [output])
    return run.finish(packages())


def _in_process(args: argparse.Namespace, load: Load) -> dict[str, Any] | None:
    """As generate.py: everything that can be checked before the weights are loaded is."""
    meet(args.join_timeout)
    first = first_rank()

    if first:
        say(versions())
    files = open_model(args.model, dtype=args.dtype, accumulator=args.accumulator)
    config = files.config
    check_tp_size(world_size(), config.sharded_dimensions())
    overrides = {name: getattr(args, name) for name in ("temperature", "top_p", "seed", "max_new_tokens")}
    params = SamplingParams.from_generation_config(args.model, **overrides)
    device = local_device(args.device)
    marks = fingerprint(files)
    needed, max_batch, choices = 0, 0, []
    if first:
        task = load(args)
        tokenizer = load_tokenizer(args.model)
        model_name = {"--model": Path(args.model).resolve().name, "ranks": world_size(), **marks}
        records = Records(args.output, _settings(args, task, (), model_name))
        params = replace(params, stop=() if args.style == "chat" else task.stop)
        context = config.max_position_embeddings if args.max_model_len is None else args.max_model_len
        room = 0 if task.choices else args.max_new_tokens
        encoded = _encode(tokenizer, task, args.style == "chat", room, context)
        needed = min(context, max(len(prompt.ids) for prompt in encoded) + room)
        check_prompts(config, [prompt.ids for prompt in encoded], needed + bool(task.choices))
        max_batch = min(args.parallel, len(encoded))
        choices = choice_tokens(tokenizer, task.prompts[0].text(len(task.prompts[0].shots)), task.choices)
    groups = init_groups(device, args.timeout, options(args, but=("model", *NOT_COMPARED)) | marks | packages())
    needed, max_batch, choices, params = groups.tp.broadcast_object((needed, max_batch, choices, params))
    max_model_len = needed if args.max_model_len is None else args.max_model_len
    limits = {"max_batch": max_batch, "max_model_len": max_model_len, "prefill_chunk": args.prefill_chunk}
    model = Model(start_generator(files, groups, device, **limits), groups.tp, tokenizer if first else None, params)
    run, jobs = None, []
    if first:
        run = Run(task, records)
        names = [task.group(index) for index in range(len(encoded))]
        jobs = plan(encoded, names, records.done, parallel=args.parallel, score=bool(choices))
    for number in range(groups.tp.broadcast_object(len(jobs))):
        _work(model, groups.tp.broadcast_object(jobs[number] if first else None), choices, run)
    close_groups()  # all ranks are done: from here on none can fail and cut short what is written
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return run.finish(packages() | {"device": name}) if run else None


def _encode(tokenizer: Any, task: Task, chat: bool, room: int, context: int) -> list[Encoded]:
    with progress_bar(iterable=task.prompts, desc="encode", unit=" prompts", leave=False) as prompts:
        return [encode(tokenizer, prompt, chat=chat, room=room, context=context) for prompt in prompts]


def _work(model: Model, job: Job, choices: list[int], run: Run | None) -> None:
    """Do a job on all ranks; `run` takes the outputs on the first."""
    if not choices:
        outputs = model.outputs(job.prompts, job.indices[0])
        if run:
            run.take(job.indices, outputs)
        return
    done = 0
    for outputs in model.choices(job.prompts, choices, job.shared):
        if run:
            run.take(job.indices[done : done + len(outputs)], outputs)
        done += len(outputs)
