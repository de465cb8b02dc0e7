"""Questions to an OpenAI-compatible server: several at a time, again after a failure that may pass."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

from moe_int8.evals.answers import END_THINK, THINK
from moe_int8.evals.prompts import Output, Prompt
from moe_int8.models.deepseek.untrusted import brief, parse_json, shown

RETRIES = 4  # of a request that failed
FIRST_WAIT = 1.0  # seconds before the first of them; doubled before each other
MAX_BYTES = 64 << 20  # of a response
PASSING = {408, 409, 425, 429}  # status codes that ask to try again, beside all of 500 and above
TOO_LONG = re.compile(r"context|too long|too many tokens|maximum.{0,20}length|max_model_len", re.IGNORECASE)


class RequestError(Exception):
    """A request failed for good; says why."""


class TooLongError(RequestError):
    """The prompt does not fit into the server's context."""


@dataclass(frozen=True)
class Server:
    """A server and how to ask it.

    Attributes:
        base_url: up to and with /v1.
        chat: conversations, in place of texts to continue.
        thinking: the chat template opens the think block.
        sampling: max_tokens, temperature and the like, as the API names them.
        timeout: seconds without an answer.
    """

    base_url: str
    chat: bool
    thinking: bool
    sampling: dict[str, Any]
    timeout: float

    def first_model(self) -> str:
        """The name of the first model that it serves.

        Raises:
            ValueError: it does not answer, or not as such a server.
        """
        try:
            return str(self._request("/models", None)["data"][0]["id"])
        except (RequestError, LookupError, TypeError) as error:
            raise ValueError(f"{self.base_url}/models names no model ({error}); is --base-url right?") from error

    def outputs(
        self, model: str, prompts: Sequence[Prompt], indices: Sequence[int], parallel: int
    ) -> Iterator[tuple[int, Output]]:
        """Ask `parallel` prompts at a time; yields each index with what came back, as it comes."""
        with ThreadPool(parallel) as pool:  # its threads end with the process, also in the middle of a request
            yield from pool.imap_unordered(lambda index: (index, self.output(model, prompts[index])), indices)

    def output(self, model: str, prompt: Prompt) -> Output:
        """Ask one prompt; shots that do not fit are dropped, the first ones first."""
        for dropped in range(len(prompt.shots) + 1):
            try:
                return self._ask(model, prompt, dropped)
            except TooLongError as error:
                reason = str(error)
            except RequestError as error:
                reason = str(error)
                break
        return Output("", "error", 0, 0, dropped, error=reason)

    def _ask(self, model: str, prompt: Prompt, dropped: int) -> Output:
        asked = {"messages": prompt.messages(dropped)} if self.chat else {"prompt": prompt.text(dropped)}
        path = "/chat/completions" if self.chat else "/completions"
        answer = self._request(path, {"model": model, **asked, **self.sampling})
        try:
            choice = answer["choices"][0]
            text = _said(choice["message"]) if self.chat else choice["text"]
            usage = answer.get("usage") or {}
            tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
            reason = str(choice["finish_reason"])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"not an answer of an OpenAI-compatible server: {shown(answer)}") from error
        if not isinstance(text, str):
            raise RequestError(f"the answer's text is {shown(text)}")
        return Output(text, reason, tokens[0], tokens[1], dropped, self.thinking)

    def _request(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send it until there is an answer or no hope for one."""
        wait = FIRST_WAIT
        for left in reversed(range(RETRIES + 1)):
            try:
                return self._send(path, body)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_message(error)}"
                if error.code not in PASSING and error.code < 500:
                    raise (TooLongError if error.code in (400, 413, 422) and TOO_LONG.search(reason) else RequestError)(
                        reason
                    ) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = brief(error)
            if left:
                time.sleep(wait)
                wait *= 2
        raise RequestError(reason)

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url.rstrip("/") + path, data, headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            text = response.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"the answer is larger than {MAX_BYTES >> 20} MB")
        return parse_json(text)


def _said(message: dict[str, Any]) -> object:
    """A message's text; thinking that the server has set apart is put back in its marks."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") or ""
    if not thought:
        return content
    return f"{THINK}{thought}" + (f"{END_THINK}{content}" if content else "")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return brief(ValueError(error.read(4096).decode(errors="replace")))
    except OSError:
        return str(error.reason)
