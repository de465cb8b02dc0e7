"""Models with known answers, in process and behind HTTP, and small data in the real formats."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import BYTES, EOS, VOCAB_SIZE, write_tokenizer

from moe_int8.models.deepseek.generate import Completion
from moe_int8.models.deepseek.text import load_tokenizer

BOS = EOS + 1
LETTERS = {letter: VOCAB_SIZE + index for index, letter in enumerate("ABCD")}  # of the tokens " A" to " D"
LETTER_VOCAB = VOCAB_SIZE + 4


def write_letter_tokenizer(folder: Path) -> None:
    """The tokenizer of single bytes, in which " A" to " D" are one token each."""
    write_tokenizer(folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    space = BYTES[[ord(letter) for letter in BYTES].index(0x120)]  # how a byte-level vocabulary writes a space
    for letter, token in LETTERS.items():
        tokenizer["model"]["vocab"][space + letter] = token
        tokenizer["model"]["merges"].append([space, letter])
    file.write_text(json.dumps(tokenizer))


def write_gsm8k(folder: Path, count: int, train: int = 5) -> list[str]:
    """test.jsonl and train.jsonl; question i is "How much is i and i?". Returns the questions."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [f"How much is {i} and {i}?" for i in range(count)]
    rows = [{"question": ask, "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i, ask in enumerate(questions)]
    shots = [{"question": f"What is {i} less 1?", "answer": f"It is {i - 1}.\n#### {i - 1}"} for i in range(train)]
    for name, lines in (("test", rows), ("train", shots)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return questions


def write_mmlu(folder: Path, counts: dict[str, int], header: bool = False) -> None:
    """dev/ and test/ of some subjects. Question i of a subject is "<subject> i?"; its answer is letter i % 4."""
    for split in ("dev", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for subject, count in counts.items():
            rows = ["question,choice0,choice1,choice2,choice3,answer"] if header else []
            for i in range(5 if split == "dev" else count):
                asked = f"{subject} {i}?" if split == "test" else f"{subject} shot {i}?"
                rows.append(f'"{asked}",one,"two, or 2",three,four,{i % 4 if header else "ABCD"[i % 4]}')
            (folder / split / f"{subject}_{split}.csv").write_text("\n".join(rows) + "\n")


def asked(prompt: str, answers: dict[str, Any]) -> str:
    """Which of the known questions stands last in a prompt."""
    return max(answers, key=lambda question: prompt.rfind(question))


def fake_generator(folder: Path, answers: dict[str, str], finish: str = "stop") -> type:
    """A class in place of `Generator` that answers questions with `answers`; in scoring, with its first letter.

    Its `batches` holds the size of each batch and its `prompts` the texts, over all instances.
    """
    tokenizer = load_tokenizer(folder)

    class Fake:
        batches: list[int] = []  # noqa: RUF012 - shared on purpose
        prompts: list[str] = []  # noqa: RUF012

        def __init__(self, model: object, max_batch: int, max_model_len: int, prefill_chunk: int) -> None:
            self.max_batch = max_batch

        def question(self, ids: list[int]) -> str:
            assert ids[0] == BOS
            assert ids.count(BOS) == 1
            Fake.prompts.append(tokenizer.decode(ids[1:]))
            return asked(Fake.prompts[-1], answers)

        def generate(self, prompts, params, *, watch=None):
            Fake.batches.append(len(prompts))
            done = []
            for index, ids in enumerate(prompts):
                tokens = tokenizer.encode(answers[self.question(ids)], add_special_tokens=False)
                said, reason = [], finish
                for token in tokens:
                    said.append(token)
                    if watch(index, token):
                        reason = "stop"
                        break
                else:
                    said += [EOS] * (finish == "stop")
                done.append(Completion(said, reason))
            return done

        def choice_logprobs(self, prompts, choices, *, shared):
            assert list(choices) == list(LETTERS.values())  # C68: the letters with their space
            assert len({tuple(ids[:shared]) for ids in prompts}) == 1
            for start in range(0, len(prompts), self.max_batch):
                batch = prompts[start : start + self.max_batch]
                Fake.batches.append(len(batch))
                likely = ["ABCD".index(answers[self.question(ids)][0]) for ids in batch]
                yield torch.nn.functional.one_hot(torch.tensor(likely), 4).float().log_softmax(-1)

    return Fake


Reply = tuple[int, Any]


@contextmanager
def serve(reply: Callable[[str, dict[str, Any]], Reply]) -> Iterator[str]:
    """A local server whose POST answers are `reply(path, body)`: status and JSON, or bytes; yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "fake-model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*reply(self.path, body))

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # the default of 5 makes parallel requests wait for a second

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completed(text: str | None, finish: str = "stop", tokens: int = 3, **message: Any) -> Reply:
    """A server's answer in both styles."""
    choice = {"text": text, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": tokens}}


def prompt_of(body: dict[str, Any]) -> str:
    """What a request asks, in either style."""
    return body.get("prompt") or "\n".join(message["content"] for message in body["messages"])
