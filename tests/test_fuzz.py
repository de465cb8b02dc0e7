"""Broken checkpoints and requests end in one clear line, or load and run right: nothing else, soon, in little memory.

The normal run takes 1,600 inputs, always the same; `make fuzz` 100,000 random ones and prints how many of each
were refused.
"""

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE, write_tokenizer
from fuzzing import INTEGERS, SCALARS, TEXTS, VALUES, changed_json, changed_shard, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_layout import TINY, write_official_checkpoint
from ranks import load_script

from moe_int8.models.deepseek.checkpoint import CONFIG, INDEX
from moe_int8.models.deepseek.convert import Settings, convert
from moe_int8.models.deepseek.generate import Generator
from moe_int8.models.deepseek.sampling import SamplingParams
from moe_int8.models.deepseek.text import (
    Detokenizer,
    StopStrings,
    encode_chat,
    encode_prompt,
    load_tokenizer,
    read_prompts,
)
from moe_int8.models.deepseek.weights import load_model, open_model

FUZZ_INPUTS = "MOE_INT8_FUZZ_INPUTS"  # how many in all; set by `make fuzz`
QUICK = FUZZ_INPUTS not in os.environ
INPUTS = int(os.environ.get(FUZZ_INPUTS, "1600"))
SMALL = TINY | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
SHARD = "model-00002-of-000003.safetensors"
GENERATION = "generation_config.json"
counts: Counter[tuple[str, str]] = Counter()


def fuzz(percent: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on its share of the inputs."""
    limits = settings(
        max_examples=INPUTS * percent // 100,
        deadline=None,  # `refused` has a limit of its own
        derandomize=QUICK,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return lambda test: limits(given(**strategies)(test))


def count(what: str, was_refused: bool) -> None:
    counts[what, "refused" if was_refused else "right"] += 1


@pytest.fixture(scope="module", autouse=True)
def _print_counts(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # no power cut is tested, and it takes most of the time
        yield
    if QUICK:
        return
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        for what in sorted({what for what, _ in counts}):
            print(f"fuzz: {what:<20}{counts[what, 'refused']:>8} refused{counts[what, 'right']:>8} right")
        print(f"fuzz: {sum(counts.values())} inputs")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of two layers, as FP8 and as INT8."""
    root = tmp_path_factory.mktemp("originals")
    write_official_checkpoint(root / "fp8", SMALL)
    (root / "fp8" / "chat_template.jinja").unlink()
    write_tokenizer(root / "fp8")
    convert(root / "fp8", root / "int8", Settings())
    return {form: root / form for form in ("fp8", "int8")}


@pytest.fixture(scope="module")
def folders(originals, tmp_path_factory) -> dict[str, Path]:
    """Copies, in which one file at a time is broken."""
    root = tmp_path_factory.mktemp("broken")
    return {form: shutil.copytree(folder, root / form) for form, folder in originals.items()}


@pytest.fixture(scope="module")
def tokenizer(originals):
    return load_tokenizer(originals["int8"])


@pytest.fixture(scope="module")
def generator(originals) -> Generator:
    return Generator(load_model(originals["int8"]), max_batch=2, max_model_len=64)


inspect = load_script("inspect_checkpoint").inspect


def run(folder: Path) -> None:
    """Load a checkpoint and generate with it, as generate.py does."""
    params = SamplingParams.from_generation_config(folder, max_new_tokens=2)
    model = load_model(open_model(folder), say=lambda line: None)
    try:
        (completion,) = Generator(model, max_batch=1, max_model_len=8).generate([[1, 2, 3]], params)
    except FloatingPointError:
        return  # weights, scales or factors of absurd size: the script says so in one line
    assert 1 <= len(completion.tokens) <= 2
    assert all(0 <= token < VOCAB_SIZE for token in completion.tokens)


def convert_and_open(folder: Path, out: Path) -> None:
    """Convert, and open the result; a conversion that fails leaves nothing that looks complete."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        convert(folder, out, Settings())
    except ValueError:
        assert not (out / CONFIG).exists()
        assert not (out / INDEX).exists()
        raise
    open_model(out)


def answer_to(folders: dict[str, Path], originals: dict[str, Path], form: str, file: str, content: bytes) -> bool:
    """Whether a checkpoint with this `content` in one of its files is refused, by everything that reads checkpoints."""
    folder = folders[form]
    replace(folder / file, content)
    try:
        if form == "int8":
            was_refused = refused(lambda: run(folder))
            inspection_refused = refused(lambda: inspect(folder))
            assert was_refused or not inspection_refused
            return was_refused
        inspection_refused = refused(lambda: inspect(folder))
        was_refused = refused(lambda: convert_and_open(folder, folder.parent / "out"))
        assert was_refused or not inspection_refused
        return was_refused
    finally:
        replace(folder / file, (originals[form] / file).read_bytes())


def replace(path: Path, content: bytes) -> None:
    """A new file under this name: the old one may still be mapped, and must not change under its readers."""
    temporary = path.with_name("new")
    temporary.write_bytes(content)
    temporary.replace(path)


@pytest.mark.parametrize("form", ["int8", "fp8"])
@fuzz(10, data=st.data())
def test_config(form, data, folders, originals):
    content = data.draw(changed_json(read(originals[form] / CONFIG), INTEGERS | VALUES))
    count(f"config.json, {form}", answer_to(folders, originals, form, CONFIG, content))


@pytest.mark.parametrize("form", ["int8", "fp8"])
@fuzz(6, data=st.data())
def test_index(form, data, folders, originals):
    content = data.draw(changed_json(read(originals[form] / INDEX)))
    count(f"index, {form}", answer_to(folders, originals, form, INDEX, content))


@pytest.mark.parametrize("form", ["int8", "fp8"])
@fuzz(10, data=st.data())
def test_shard(form, data, folders, originals):
    content = data.draw(changed_shard((originals[form] / SHARD).read_bytes()))
    count(f"shard, {form}", answer_to(folders, originals, form, SHARD, content))


@fuzz(4, data=st.data(), file=st.sampled_from([CONFIG, INDEX]))
def test_before_the_download(data, file, originals, tmp_path_factory):
    """config.json and index alone, as inspect_checkpoint.py takes them."""
    folder = tmp_path_factory.mktemp("described")
    for name in (CONFIG, INDEX):
        (folder / name).write_bytes((originals["int8"] / name).read_bytes())
    (folder / file).write_bytes(data.draw(changed_json(read(folder / file), INTEGERS | VALUES)))
    count("no shards", refused(lambda: inspect(folder)))
    shutil.rmtree(folder)


@fuzz(6, data=st.data())
def test_generation_config(data, folders, originals):
    content = data.draw(changed_json(read(originals["int8"] / GENERATION)))
    folder = folders["int8"]
    replace(folder / GENERATION, content)
    count("generation_config", refused(lambda: SamplingParams.from_generation_config(folder)))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# requests

NUMBERS = st.sampled_from([0, 1, -1, 0.5, 2**70, 1e-320, 1e39, float("nan"), float("inf"), True, "1", None, [1]])
TOKENS = st.integers(0, VOCAB_SIZE - 1) | st.sampled_from([-1, VOCAB_SIZE, 2**63, 1.5, True, "a", None])
RIGHT_PROMPTS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20), max_size=4)
PROMPTS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1) | TOKENS, max_size=70) | VALUES, max_size=4)
RIGHT_PARAMS = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "seed": st.integers(),
    "ignore_eos": st.booleans(),
    "eos_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3).map(tuple),
}
PARAMS = {name: values | NUMBERS for name, values in RIGHT_PARAMS.items()} | {
    "max_new_tokens": NUMBERS,
    "stop": st.lists(TEXTS, max_size=2).map(tuple) | VALUES,
    "eos_token_ids": st.lists(TOKENS, max_size=3).map(tuple) | VALUES,
}


def parameters(values: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the values, and few tokens unless `values` has its own number of them."""
    return st.fixed_dictionaries({}, optional=values).map(lambda params: {"max_new_tokens": 3} | params)


@fuzz(12, prompts=RIGHT_PROMPTS | PROMPTS, params=parameters(RIGHT_PARAMS) | parameters(PARAMS))
def test_requests(prompts, params, generator):
    def answer() -> None:
        checked = SamplingParams(**params)
        if checked.max_new_tokens > 64:
            checked = SamplingParams(**(params | {"max_new_tokens": 64}))
        completions = generator.generate(prompts, checked)
        for prompt, completion in zip(prompts, completions, strict=True):
            assert 1 <= len(completion.tokens) <= min(checked.max_new_tokens, 64 - len(prompt))
            assert all(0 <= token < VOCAB_SIZE for token in completion.tokens)
            assert completion.finish_reason in ("stop", "length")

    count("requests", refused(answer))
    assert sorted(generator.cache.free) == list(range(generator.cache.pool.shape[1]))  # no block is lost


LINES = st.lists(
    st.binary(max_size=20)
    | st.fixed_dictionaries({"prompt": TEXTS}).map(lambda line: json.dumps(line).encode())
    | st.dictionaries(TEXTS | st.just("prompt"), VALUES, max_size=2).map(lambda line: json.dumps(line).encode())
    | st.sampled_from([b"[" * 100_000, b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"}', b"\xff", b"\x85", b""]),
    max_size=4,
).map(b"\n".join)


@fuzz(8, content=LINES, suffix=st.sampled_from([".txt", ".jsonl"]))
def test_prompts_file(content, suffix, tokenizer, tmp_path):
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(content)

    def answer() -> None:
        prompts = read_prompts(path)
        assert len(prompts) <= content.count(b"\n") + content.count(b"\r") + 1
        for prompt in prompts:
            assert tokenizer.decode(encode_prompt(tokenizer, prompt), skip_special_tokens=True) == without_special(
                prompt
            )

    count("prompts file", refused(answer))


ROLES = st.sampled_from(["system", "user", "assistant"])
RIGHT_MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=20)}), min_size=1, max_size=4
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS})
    | st.dictionaries(st.sampled_from(["role", "content", "name"]), VALUES, max_size=3)
    | SCALARS,
    max_size=4,
)


@fuzz(6, messages=RIGHT_MESSAGES | MESSAGES)
def test_chat_messages(messages, tokenizer):
    def answer() -> None:
        ids = encode_chat(tokenizer, messages)
        assert ids[0] == tokenizer.bos_token_id
        text = "".join(f"{message['role']}:{message['content']};" for message in messages) + "assistant:"
        assert tokenizer.decode(ids, skip_special_tokens=True) == without_special(text)

    count("chat messages", refused(answer))


def without_special(text: str) -> str:
    return text.replace("<bos>", "").replace("<eos>", "")


# streaming

LETTERS = st.text(alphabet="ab\n", max_size=12)


@fuzz(6, stops=st.lists(LETTERS, max_size=3), text=LETTERS, cuts=st.lists(st.integers(0, 12), max_size=5))
def test_stop_strings(stops, text, cuts):
    def answer() -> None:
        stream = StopStrings(stops)
        places = [0, *sorted(cuts), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(places)]
        shown = "".join(map(stream.add, pieces)) + stream.flush()
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert shown == (text[: min(ends)[1]] if ends else text)
        assert stream.stopped == bool(ends)

    count("stop strings", refused(answer))


@fuzz(6, ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30))
def test_streamed_text(ids, tokenizer):
    def answer() -> None:
        detokenizer = Detokenizer(tokenizer)
        text = "".join(map(detokenizer.add, ids)) + detokenizer.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)

    count("streamed text", refused(answer))
