"""Scores and paired comparison against values worked out by hand and by counting."""

import itertools
import math

import pytest

from moe_int8.evals.statistics import Paired, score


def test_the_score_and_its_sample_error():
    result = score([True] * 7 + [False] * 3)
    assert result["score"] == 0.7
    assert result["n"] == 10
    assert result["stderr"] == pytest.approx(math.sqrt(0.21 / 9), rel=1e-15)
    assert score([True])["stderr"] is None


def test_pairs_are_counted_by_question():
    a = [True, True, True, False, False, True]
    b = [True, False, False, True, False, True]
    assert Paired.of(a, b) == Paired(both=2, only_a=2, only_b=1, neither=1)
    assert Paired.of(a, b).difference == -1 / 6
    with pytest.raises(ValueError):
        Paired.of(a, b[1:])


@pytest.mark.parametrize("only_a, only_b", [(0, 0), (1, 0), (3, 3), (2, 7), (9, 1)])
def test_mcnemar_is_the_share_of_coin_flips_as_uneven(only_a, only_b):
    flips = [sum(coins) for coins in itertools.product((0, 1), repeat=only_a + only_b)]
    as_uneven = [abs(2 * heads - len_) >= abs(only_a - only_b) for heads in flips for len_ in [only_a + only_b]]
    assert Paired(5, only_a, only_b, 5).mcnemar() == pytest.approx(sum(as_uneven) / len(flips), rel=1e-12)


def test_mcnemar_of_many_questions_neither_overflows_nor_vanishes():
    assert 0.9 < Paired(0, 7000, 7000, 0).mcnemar() <= 1
    assert 0 < Paired(0, 7000, 6000, 0).mcnemar() < 1e-10


def test_the_interval_holds_the_difference_and_narrows_with_the_questions():
    low, high = Paired(80, 6, 10, 4).interval()
    # by hand: (11 - 7) / 102 and 1.96 sqrt((18 / 102 - (4 / 102)^2) / 102)
    assert (low + high) / 2 == pytest.approx(4 / 102)
    assert (high - low) / 2 == pytest.approx(1.95996 * math.sqrt((18 / 102 - (4 / 102) ** 2) / 102), rel=1e-5)
    larger = Paired(8000, 600, 1000, 400).interval()
    assert low < larger[0] < 0.04 < larger[1] < high
    equal = Paired(50, 0, 0, 50).interval()
    assert equal[0] == -equal[1] < 0
    assert Paired(0, 1, 0, 0).interval()[0] >= -1
