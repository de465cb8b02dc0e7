"""Between text and token ids: loading the tokenizer, prompts with exactly one BOS, streamed text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_int8.models.deepseek.untrusted import brief, parse_json, read_text, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character, or not yet
MAX_STOP = 1024  # characters of a stop string: each new token is compared with all of it
MAX_CUT_BYTES = 3  # an incomplete UTF-8 character has at most 3 bytes, so it lies within the last 3 tokens


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a checkpoint's own `tokenizer.json`, from local files only and without running code from the checkpoint.

    Raises:
        ValueError: the folder or its `tokenizer.json` is missing or cannot be read.
        ModuleNotFoundError: transformers is not installed.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        what = (
            "has no tokenizer.json: copy it there from the original checkpoint" if folder.is_dir() else "is no folder"
        )
        raise ValueError(f"cannot load a tokenizer: {folder} {what}")
    try:
        from transformers import PreTrainedTokenizerFast
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the tokenizer needs transformers: pip install 'moe-int8[scripts]'") from error
    # Not AutoTokenizer: the official tokenizer_config.json says LlamaTokenizerFast, which transformers 5 builds anew by
    # Llama's rules unless it notices that they do not fit. This class takes tokenizer.json as it is.
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot parse
        raise ValueError(f"cannot load the tokenizer in {folder}: {brief(error)}") from error


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: a prompt a line, or (.jsonl) a JSON object a line, with the key "prompt"; none is empty.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8, holds no prompts, or a line is no such object; names the line.
    """
    lines = enumerate(read_text(path).split("\n"), start=1)
    prompts = [_prompt_of(path, number, line) for number, line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a plain prompt: exactly one BOS in front, whether or not `text` starts with one already.

    The BOS is put here, because tokenizers disagree on it: transformers 4 adds one for the official files, transformers
    5 does not. A tokenizer without a BOS gets none. The empty prompt is the BOS alone.

    Raises:
        ValueError: the prompt is no text of whole characters, or empty and the tokenizer has no BOS, so that there is
            nothing to start from.
    """
    check_text("the prompt", text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:1] != [bos]:
        ids = [bos, *ids]
    if not ids:
        raise ValueError("the prompt is empty and the tokenizer has no BOS token to start from")
    return ids


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation under the checkpoint's chat template, ready for the assistant's answer.

    Args:
        tokenizer: from `load_tokenizer`.
        messages: at least one {"role": "system" | "user" | "assistant", "content": ...}.

    Raises:
        ValueError: no message, one without a role and a content, no chat template, or the template fails on them.
    """
    if not messages:
        raise ValueError("a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f'message {index} must be {{"role": ..., "content": ...}}, got {shown(message)}')
        for key in ("role", "content"):
            check_text(f"the {key} of message {index}", message.get(key))
    if tokenizer.chat_template is None:
        raise ValueError(
            "the checkpoint has no chat template: copy tokenizer_config.json (or chat_template.jinja) from the "
            "original checkpoint into its folder, or send a plain prompt"
        )
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is the checkpoint's own program, in Jinja's sandbox: it may raise anything
        raise ValueError(f"the chat template refuses the messages: {brief(error)}") from error
    return encode_prompt(tokenizer, text)


def _prompt_of(path: Path, number: int, line: str) -> str:
    if path.suffix != ".jsonl":
        return line
    where = f"{path}, line {number}"
    try:
        prompt = parse_json(line.encode()).get("prompt")
    except ValueError as error:
        raise ValueError(f'{where} {error}; expected {{"prompt": "..."}}') from error
    check_text(f"{where}: the prompt", prompt)
    return str(prompt)


class Detokenizer:
    """Token ids to text as they come, in whole characters: a character cut by a token boundary waits for its rest.

    For byte-level tokenizers (all of DeepSeek's). Special tokens have no text. All deltas and the flush together equal
    `tokenizer.decode(ids, skip_special_tokens=True)`, also for bytes that are no UTF-8, and each token costs the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens, as long as they may end in an incomplete character
        self._shown = 0  # how many characters of the window's text are out already

    def add(self, token_id: int) -> str:
        """The text that this token completes, often empty or more than one character."""
        if not self._decode([token_id]):
            return ""  # a special token must not push an incomplete character's bytes out of the window
        self._window.append(token_id)
        text = self._decode(self._window)
        # An incomplete character decodes to one replacement sign at the very end; all before it is final.
        end = len(text) - text.endswith(REPLACEMENT)
        delta = text[self._shown : end]
        if end == len(text):
            self._window, self._shown = [], 0
        elif len(self._window) > MAX_CUT_BYTES:
            self._window = self._window[-MAX_CUT_BYTES:]
            self._shown = len(self._decode(self._window)) - 1
        else:
            self._shown = end
        return delta

    def flush(self) -> str:
        """The rest, at the end of the sequence: a character that stays incomplete comes out as a replacement sign."""
        rest = self._decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopStrings:
    """Cuts streamed text before the first stop string, and shows nothing that may still become part of one.

    The stop string that is complete first wins, of several that end at the same character the longest; so the result
    does not depend on how the text is cut into pieces.

    Raises:
        ValueError: a stop string is empty or too long, or `stops` is a single string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        check_stops(stops)
        self.stopped = False
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> str:
        """Take the next piece of text and return what may be shown now; nothing once stopped."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        end = self._first_open_start(text)
        self._held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """What was held back, at the end of the sequence: it did not become a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _first_open_start(self, text: str) -> int:
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


def check_stops(stops: Sequence[str]) -> None:
    """Raise ValueError unless `stops` is a sequence of strings of 1 to MAX_STOP characters."""
    if isinstance(stops, str):
        raise ValueError(f"stop must be a sequence of strings, got the string {shown(stops)}")
    if not (isinstance(stops, Sequence) and all(isinstance(stop, str) and stop for stop in stops)):
        raise ValueError(f"stop strings must not be empty, got {shown(stops)}")
    if any(len(stop) > MAX_STOP for stop in stops):
        raise ValueError(f"stop strings may have {MAX_STOP} characters, got {shown(stops)}")


def check_text(what: str, text: object) -> None:
    """Raise ValueError unless `text` is a string of whole characters: no half of a UTF-16 pair, as JSON can hold."""
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string, got {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is no valid Unicode text: {shown(text)}") from None
