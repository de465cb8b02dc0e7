"""The ignore list: names, and patterns that mean what Python's regular expressions mean by them."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_int8.models.deepseek.ignore import MOST_PATTERNS, IgnoreList


def test_names_are_whole_names():
    ignored = IgnoreList(["lm_head", "model.layers.2"])
    assert "lm_head" in ignored
    assert "model.lm_head" not in ignored
    assert "model.layers.2.eh_proj" not in ignored
    assert "modelxlayersx2" not in ignored  # a dot of a name is a dot


@pytest.mark.parametrize(
    "pattern, matching, others",
    [
        (r"re:.*mlp\.gate$", ["model.layers.3.mlp.gate"], ["model.layers.3.mlp.gate_proj", "model.layers.3.mlpxgate"]),
        ("re:.*mlp.gate$", ["model.layers.3.mlp.gate", "a.mlpxgate"], ["model.layers.3.mlp.gate_proj"]),
        ("re:model.layers.1.*", ["model.layers.1.x", "model.layers.10"], ["a.model.layers.1.x"]),
        ("re:^lm_head", ["lm_head", "lm_heads"], ["model.lm_head"]),
    ],
)
def test_patterns_match_from_the_start(pattern, matching, others):
    ignored = IgnoreList([pattern])
    assert all(module in ignored for module in matching)
    assert not any(module in ignored for module in others)


PARTS = st.sampled_from(["a", "b", r"\.", ".", ".*", "-", "_1"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(PARTS, max_size=6).map("".join), st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.text("ab._-1")
)
def test_patterns_mean_what_they_mean_to_python(body, begin, end, module):
    pattern = begin + body + end
    assert (module in IgnoreList([f"re:{pattern}"])) == bool(re.match(pattern, module))


@pytest.mark.parametrize("pattern", ["(a+)+$", "[ab]", "a|b", "a*", "a{3}", "(", r"\d+", "a$b", "é"])
def test_other_patterns_are_refused_by_name(pattern):
    with pytest.raises(ValueError, match=f"ignore entry {re.escape(repr('re:' + pattern))} is not supported"):
        IgnoreList([f"re:{pattern}"])


def test_no_pattern_takes_long():
    ignored = IgnoreList(["re:" + ".*a" * 60 + "b$"] * MOST_PATTERNS)
    start = time.monotonic()
    assert "a" * 256 not in ignored
    assert time.monotonic() - start < 5  # takes milliseconds; Python's `.*a.*a…b` takes longer than anyone waits


@pytest.mark.parametrize("entries", [5, "lm_head", {"a": 1}, ["a", 5], [None]])
def test_a_list_of_names_is_needed(entries):
    with pytest.raises(ValueError, match="ignore must be a list of names"):
        IgnoreList(entries)


def test_the_number_of_patterns_is_bounded_and_that_of_names_is_not():
    with pytest.raises(ValueError, match=f"ignore holds {MOST_PATTERNS + 1} patterns"):
        IgnoreList(["re:a"] * (MOST_PATTERNS + 1))
    assert "module.7" in IgnoreList([f"module.{i}" for i in range(10_000)])
