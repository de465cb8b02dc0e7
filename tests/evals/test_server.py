"""What a server may do: fail and recover, refuse a long prompt, set its thinking apart, or talk nonsense."""

import threading
import time
import urllib.request

import pytest
from eval_fakes import completed, prompt_of, serve

from moe_int8.evals.answers import answer_of
from moe_int8.evals.prompts import Output, Prompt
from moe_int8.evals.server import Server

PROMPT = Prompt((("Q 1", " one"), ("Q 2", " two")), "Q 3")


@pytest.fixture(autouse=True)
def _in_short_time(monkeypatch) -> None:
    monkeypatch.setattr("moe_int8.evals.server.FIRST_WAIT", 0.001)
    monkeypatch.setattr("moe_int8.evals.server.RETRIES", 2)


def ask(reply, chat=False, timeout=5.0) -> Output:
    with serve(reply) as url:
        return Server(url, chat, False, {"max_tokens": 5}, timeout).output("m", PROMPT)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_and_what_was_asked(chat):
    bodies = []

    def reply(path, body):
        bodies.append((path, body))
        return completed(" three", "length", tokens=7)

    assert ask(reply, chat) == Output(" three", "length", 10, 7)
    ((path, body),) = bodies
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (body["model"], body["max_tokens"]) == ("m", 5)
    assert prompt_of(body) == ("Q 1\none\nQ 2\ntwo\nQ 3" if chat else PROMPT.text())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(status):
    replies = iter([(status, b"busy"), (status, b"busy"), completed("three")])
    assert ask(lambda *_: next(replies)).text == "three"


def test_a_lasting_failure_is_an_output_with_its_reason():
    calls = []

    def reply(*_):
        calls.append(1)
        return 500, b"out of memory"

    output = ask(reply)
    assert len(calls) == 3  # once, and two retries
    assert (output.text, output.finish_reason, output.output_tokens) == ("", "error", 0)
    assert output.error == "HTTP 500: out of memory"


def test_a_refusal_is_not_tried_again():
    calls = []

    def reply(*_):
        calls.append(1)
        return 401, {"error": "no key"}

    assert "HTTP 401" in ask(reply).error
    assert len(calls) == 1


def test_a_silent_server_runs_into_the_timeout():
    def reply(*_):
        time.sleep(0.3)
        return completed("late")

    assert "timed out" in ask(reply, timeout=0.05).error


def test_a_server_that_is_not_there():
    with serve(lambda *_: completed("x")) as url:
        pass
    server = Server(url, False, False, {}, 1.0)
    assert "refused" in server.output("m", PROMPT).error
    with pytest.raises(ValueError, match=r"/v1/models names no model .*refused.* is --base-url right"):
        server.first_model()


def test_shots_that_do_not_fit_are_dropped_from_the_front():
    def reply(_, body):
        if "Q 2" in body["prompt"]:
            return 400, {"error": {"message": "This model's maximum context length is 8 tokens."}}
        return completed("three")

    output = ask(reply)
    assert (output.text, output.dropped_shots, output.error) == ("three", 2, None)
    never = ask(lambda *_: (400, {"message": "the prompt is too long"}))
    assert (never.dropped_shots, "too long" in never.error) == (2, True)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_c66_thinking_that_the_server_sets_apart_does_not_count(field):
    closed = ask(lambda *_: completed("15", **{field: "maybe 12"}), chat=True)
    assert answer_of(closed.text).text == "15"
    unclosed = ask(lambda *_: completed(None, "length", **{field: "maybe 12"}), chat=True)
    assert answer_of(unclosed.text).text is None
    assert ask(lambda *_: completed(None), chat=True).text == ""


@pytest.mark.parametrize(
    "reply",
    [
        (200, {}),
        (200, {"choices": []}),
        (200, {"choices": [{"text": 5, "finish_reason": "stop"}]}),
        (200, {"choices": [{"text": "a"}]}),
        (200, []),
        (200, b"<html>"),
        (200, b"\xff"),
    ],
)
def test_nonsense_is_a_failure_with_a_reason(reply):
    assert ask(lambda *_: reply).error


def test_as_many_requests_run_at_a_time_as_asked_for():
    running, most, lock = [0], [0], threading.Lock()

    def reply(*_):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return completed("three")

    with serve(reply) as url:
        outputs = dict(Server(url, False, False, {}, 5.0).outputs("m", [PROMPT] * 12, [*range(2, 12)], parallel=4))
    assert sorted(outputs) == list(range(2, 12))
    assert most[0] == 4


def test_the_key_is_sent_and_the_first_model_found(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    sent = []
    send = urllib.request.urlopen
    monkeypatch.setattr("urllib.request.urlopen", lambda request, **more: sent.append(request) or send(request, **more))
    with serve(lambda *_: completed("x")) as url:
        assert Server(url + "/", False, False, {}, 5.0).first_model() == "fake-model"
    assert sent[0].get_header("Authorization") == "Bearer secret"
