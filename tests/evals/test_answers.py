"""What counts of an output: the mistakes that other harnesses made, one by one."""

from fractions import Fraction

import pytest

from moe_int8.evals.answers import MAX_DIGITS, answer_of, choice_letter, flexible_number, strict_number

NUMBERS = {
    "She paid 18 dollars, in all.": 18,
    "So 42, then.": 42,
    "profit is $1,250.": 1250,
    "12,345,678 seeds": 12345678,
    "$20,500 + $4,500 = $25,000": 25000,
    r"\boxed{8{,}500}": 8500,
    r"\boxed{72} (see step 3)": 72,
    r"\boxed{\text{18 dollars}} in 2 days": 18,
    r"\boxed{\$1{,}250.50}": Fraction("1250.5"),
    r"$8\,500$": 8500,
    r"8,\!500": 8500,
    r"\boxed{\frac{9}{2}}": Fraction(9, 2),
    r"\boxed{} so 5": 5,
    r"\boxed{7": 7,
    "$29.00": 29,
    "29.": 29,
    "0.50": Fraction(1, 2),
    "it is .5": Fraction(1, 2),
    "Rs.500": 500,
    "-5": -5,
    "-$5": -5,
    "10-5": 5,
    "- 5 apples": 5,
    "x = \N{MINUS SIGN}5": -5,
    "1, 2, 3": 3,
    "1,2345": 2345,
    "**1,000**": 1000,
    "45km": 45,
    "#### 18\nThat is 2 a day.": 18,
    "3/0": None,
    "no number": None,
    "": None,
    "1" * (MAX_DIGITS + 1): None,
    "1" * 10**5: None,  # int() itself refuses so many
}


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:30])
def test_c61_c62_c63_c64_the_number_of_a_text(text):
    assert flexible_number(text) == NUMBERS[text]


def test_c64_numbers_are_compared_not_strings():
    assert flexible_number("$29.00") == flexible_number("29")
    assert flexible_number("29.") == flexible_number("29")
    assert flexible_number("0.50") == flexible_number("0.5")
    assert flexible_number("-5") != flexible_number("5")


@pytest.mark.parametrize(
    "text, number",
    [
        ("so\n#### 18", 18),
        ("#### $1,250.00", 1250),
        ("#### **18**", 18),
        ("#### -3", -3),
        ("####18 dollars", 18),
        ("#### 18.", 18),
        ("**#### 18.**", 18),
        ("#### 1. **Count**\n#### 18", 18),
        ("#### 18\n#### 5", 18),
        ("#### 1. Count the eggs\nNine.\n#### 12) Sell\n#### 18", 18),
        ("The answer is 18.", None),
        ("#### none", None),
    ],
)
def test_strict_is_what_stands_behind_the_mark(text, number):
    assert strict_number(text) == number


def test_c65_a_run_on_into_another_question_is_cut():
    answer = answer_of("... #### 18\n\nQuestion: Tom has 2...\nAnswer: ... #### 5")
    assert flexible_number(answer.text) == strict_number(answer.text) == 18
    assert answer.cut
    plain = answer_of("She has 18.\n\n**Question 2:** Tom has 5")
    assert (flexible_number(plain.text), plain.cut) == (18, True)


def test_a_question_that_is_only_said_again_is_no_run_on():
    answer = answer_of("\nQuestion: how many?\nAnswer: 18")
    assert (flexible_number(answer.text), answer.cut) == (18, False)


@pytest.mark.parametrize(
    "text, thinking, answer",
    [
        ("<think>maybe 12</think>The answer is 15.", False, "The answer is 15."),
        ("maybe 12</think>The answer is 15.", True, "The answer is 15."),
        ("maybe 12</think>The answer is 15.", False, "The answer is 15."),
        ("<think>maybe 12</think>15", True, "15"),
        ("<think>a<think>b</think>c</think>15", False, "15"),
        ("<think>1</think>#### 18\n\nQuestion: x\n<think>2</think>#### 5", False, "#### 18"),
        ("<think>1</think>#### 18\n\nQuestion: x\n<think>2 #### 5", False, "#### 18"),
        ("<think>maybe 12", False, None),
        ("maybe 12", True, None),
        ("15 <think>or 12", False, None),
        ("<think>a\nQuestion: b", False, None),
        ("", True, None),
        ("", False, ""),
    ],
)
def test_c66_only_what_follows_the_thinking_counts(text, thinking, answer):
    assert answer_of(text, thinking=thinking).text == answer


@pytest.mark.parametrize(
    "text, letter",
    [
        (" B", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B is right, not C", "B"),
        ("A", "A"),
        ("A.", "A"),
        ("A is right", "A"),
        ("The answer is (C), since A and B fail.", "C"),
        ("Option A is wrong. Answer: D", "D"),
        (r"First B, then \boxed{\text{C}} of A", "C"),
        ("Answer: D. Option A was tempting.", "D"),
        ("A good reader sees that it must be D.", "D"),
        ("Compare A with B", "B"),
        ("AB", None),
        ("I don't know", None),
        ("", None),
    ],
)
def test_c68_letters_as_they_are_written(text, letter):
    assert choice_letter(text) == letter
