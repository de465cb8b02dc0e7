"""The demo model's data: answers that are right, formats of the evaluations, and held-out sets that are held out."""

import csv
import itertools
import json
import random
import re
from fractions import Fraction

import pytest

from moe_int8.evals import gsm8k, mmlu
from moe_int8.evals.demo import questions as questions_module
from moe_int8.evals.demo import story_forms
from moe_int8.evals.demo.corpus import CHOICES, SHOTS_FILE, TEXT, WORD_PROBLEMS, Corpus, write_held_out
from moe_int8.evals.demo.forms import Pattern, draw_number, is_held_out
from moe_int8.evals.demo.questions import SUBJECTS, Questions
from moe_int8.evals.demo.story_forms import FRACTIONS, HE, SHE
from moe_int8.evals.demo.tokenizer import ASSISTANT, BOS, EOS, USER, build_tokenizer, write_tokenizer
from moe_int8.evals.demo.word_problems import LARGEST_TOTAL, Difficulty, word_problem
from moe_int8.evals.demo.world import RELATIONS, World
from moe_int8.evals.gsm8k import Gsm8k
from moe_int8.evals.in_process import choice_tokens
from moe_int8.evals.mmlu import CATEGORIES, Mmlu
from moe_int8.models.deepseek.text import encode_chat, encode_prompt, load_tokenizer

BOTH = pytest.mark.parametrize("held_out", [False, True], ids=["training", "held_out"])


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Difficulty(), countries=30)


@pytest.fixture(scope="module")
def held_out_folder(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "heldout"
    write_held_out(corpus, folder, count=210, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory):
    texts = itertools.islice(corpus.training(random.Random(0), few_shot=False), 1500)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(build_tokenizer(texts, 600), folder, max_length=1024)
    return load_tokenizer(folder)


def solve(question: str) -> Fraction:
    """Read a word problem sentence by sentence, by what they say and not by how they were made."""
    parts = {words: number for number, words in FRACTIONS.items()}
    start, *rest = re.split(r"(?<=[.?]) ", question)
    (total,) = map(Fraction, re.findall(r"\d+", start))
    for sentence in rest:
        numbers = [Fraction(number) for number in re.findall(r"\d+", sentence)]
        gains = re.search(r"\b(buys|finds|gets|receives|collects)\b", sentence) and "money" not in sentence
        if sentence.endswith("?"):
            continue  # what it asks for was said before
        if "times as many" in sentence:
            total *= numbers[0]
        elif "pile" in sentence:
            total /= numbers[0]
        elif "put " in sentence:
            total += total + numbers[0]
        elif "sold for $" in sentence or "price" in sentence:
            total *= numbers[0]
        elif re.search(r"uses \d+|Every day", sentence):
            total /= numbers[0]
        elif "%" in sentence:
            total += total * numbers[0] / 100
        elif not numbers:
            (part,) = (number for words, number in parts.items() if re.search(rf"\b{words} of", sentence))
            total -= total / part
        else:
            change = numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
            total += change if gains else -change
    return total


@BOTH
def test_word_problems_are_answered_right(held_out):
    rng = random.Random(1)
    for _ in range(400):
        problem = word_problem(rng, Difficulty(), held_out)
        *lines, last = problem.answer.split("\n")
        value = None
        for line in lines:
            inside, result, after = re.fullmatch(r"[A-Z][a-z ]+<<(.*)=(\d+)>>(\d+) [a-z ]+\.", line).groups()
            assert after == result
            value = eval(re.sub(r"(\d+)", r"Fraction(\1)", inside))
            assert value == int(result)
            assert 0 < value <= LARGEST_TOTAL
        assert last == f"#### {value}"
        assert solve(problem.question) == value, problem.question
        assert problem.steps == len(lines)
        assert 3 <= problem.steps <= 8


def test_difficulty_bounds_what_a_question_says():
    rng = random.Random(2)
    problems = [word_problem(rng, Difficulty((2, 4), amount=60, factor=5), False) for _ in range(300)]
    assert {problem.steps for problem in problems} == {2, 3, 4}
    assert max(max(problem.amounts) for problem in problems) in range(50, 61)
    multipliers = [int(k) for problem in problems for k in re.findall(r"for (\d+) times", problem.question)]
    assert set(multipliers) == {2, 3, 4, 5}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": (5, 3)}, "steps must be two numbers from 2 up, the smaller one first, got 5 and 3"),
        ({"steps": (1, 3)}, "got 1 and 3"),
        ({"amount": 49}, "amount must be from 50"),
        ({"factor": 3}, "factor must be from 4"),
    ],
)
def test_a_difficulty_that_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Difficulty(**settings)


def right_answer(question, world: World) -> str:
    """Find the answer from the text and the facts."""
    text = question.question
    if computed := re.search(r"(\d+) ([-+*]) (\d+)(?: \+ (\d+))?", text):
        a, sign, b, c = computed.groups()
        return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] + int(c or 0))
    if divided := re.search(r"(\d+) (?:is )?divided by (\d+)", text):
        return str(int(divided[1]) % int(divided[2]))
    if sequence := re.search(r"(\d+), (\d+), (\d+)\?", text):
        return str(2 * int(sequence[3]) - int(sequence[2]))
    if "binary" in text:
        (number,) = re.findall(r"\d+", text)
        return f"{int(number):b}" if re.search(r"in binary|as a binary", text) else str(int(number, 2))
    asked = {phrase: each for each in RELATIONS for phrase in each.phrases if f" {phrase} " in text}
    phrase = min(asked, key=text.index)
    name, rest = asked[phrase].name, text.split(f" {phrase}", 1)[1]
    cities = [country for country, capital in world.facts["capital"].items() if capital in rest]
    people = [person for person in world.facts["home"] if person in rest]
    if people and asked[phrase].thing == "country":
        return world.facts[name][world.facts["home"][people[0]]]
    (thing,) = people or cities or [country for country in world.facts["capital"] if f" {country}?" in rest]
    return world.facts[name][thing]


@BOTH
def test_choice_questions_are_answered_right(held_out):
    world = World(30)
    questions = Questions(world, 999, held_out)
    rng = random.Random(3)
    letters = []
    for subject in SUBJECTS:
        for _ in range(150):
            question = questions.draw(rng, subject)
            assert question.subject == subject
            assert len(set(question.choices)) == 4
            assert question.choices[question.answer] == right_answer(question, world), question
            letters.append(question.answer)
    # 1,050 draws of 4: three standard deviations of a letter's share are 0.04
    assert all(0.21 < letters.count(letter) / len(letters) < 0.29 for letter in range(4))


def test_statements_say_what_is_so():
    world = World(30)
    questions = Questions(world, 999, held_out=False)
    rng = random.Random(4)
    for statement in {questions.statement(rng) for _ in range(300)}:
        if computed := re.fullmatch(r"(\d+) \* (\d+) = (\d+)\.", statement):
            assert int(computed[1]) * int(computed[2]) == int(computed[3])
            assert not is_held_out(int(computed[1]) + int(computed[2]))
            continue
        said = {phrase: each for each in RELATIONS for phrase in each.phrases if statement.lower().startswith(phrase)}
        phrase = max(said, key=len)  # "the year of the founding of" also begins like "the year of"
        thing, value = re.fullmatch(rf"(?i:{phrase}) (.*) is (.*)\.", statement).groups()
        assert world.facts[said[phrase].name][thing] == value


def test_the_world_is_always_the_same_and_its_own_names_are_used_once():
    world = World(400)
    assert world.facts == World(400).facts
    own = [value for relation in RELATIONS if relation.ending for value in world.facts[relation.name].values()]
    assert len(own) == len(set(own)) == 400 * sum(1 for relation in RELATIONS if relation.ending)
    assert len(world.facts["home"]) == 800


def test_held_out_problems_share_no_form_name_or_amount_with_training():
    rng = random.Random(5)
    train = [word_problem(rng, Difficulty(), False) for _ in range(4000)]
    held = [word_problem(rng, Difficulty(), True) for _ in range(1000)]

    def all_of(problems, what: str) -> set:
        return {each for problem in problems for each in getattr(problem, what)}

    def names(problems) -> set[str]:
        return {name for name in f"{SHE} {HE}".split() if any(re.search(rf"\b{name}\b", p.question) for p in problems)}

    for what, least in (("forms", 150), ("amounts", 120)):
        assert not all_of(train, what) & all_of(held, what)
        assert len(all_of(held, what)) >= least
    assert not names(train) & names(held)
    assert (len(names(train)), len(names(held))) == (34, 6)
    # Training has made-up names besides, which a model cannot know by heart; the held-out set has none.
    made_up = [{re.search(r"([A-Z]\w+) (?:has|owns|starts)", p.question)[1] for p in some} for some in (train, held)]
    assert [len(found) > 900 for found in made_up] == [True, False]
    assert len(made_up[1]) == 6
    assert not {p.question for p in train} & {p.question for p in held}
    kinds = {form.split(":")[0] for form in all_of(train, "forms")}
    assert {form.split(":")[0] for form in all_of(held, "forms")} == kinds  # every kind of sentence is tested


def test_held_out_questions_share_no_form_and_no_numbers_with_training():
    world = World(30)
    train, held = ([], [])
    for drawn, held_out in ((train, False), (held, True)):
        questions, rng = Questions(world, 999, held_out), random.Random(6)
        drawn += [questions.draw(rng, subject) for subject in SUBJECTS for _ in range(1500)]
    assert not {q.form for q in train} & {q.form for q in held}
    assert {q.form.split(":")[0] for q in train} == {q.form.split(":")[0] for q in held}
    computed = [{(q.form.split(":")[0], q.numbers) for q in drawn if q.numbers} for drawn in (train, held)]
    assert not computed[0] & computed[1]
    assert min(map(len, computed)) > 1000
    assert not {q.question for q in train} & {q.question for q in held}


PATTERNS = [each for module in (story_forms, questions_module) for each in vars(module).values()]
PATTERNS = [each for each in PATTERNS if isinstance(each, Pattern)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_every_word_of_a_held_out_form_occurs_in_training(pattern):
    rng = random.Random(7)

    def indices(held_out: bool) -> set[tuple[int, str]]:
        forms = (pattern.draw(rng, held_out)[1].split(":")[1].split(".") for _ in range(1500))
        return {place for form in forms for place in enumerate(form)}

    everything = {(place, str(index)) for place, slot in enumerate(pattern.slots) for index in range(len(slot))}
    assert indices(held_out=False) == everything
    assert indices(held_out=True) <= everything


def test_a_seventh_of_the_forms_is_held_out():
    pattern = Pattern("x", (("a", "b", "c", "d", "e"), ("f", "g"), ("h", "i", "j", "k")))
    rng = random.Random(7)
    train, held = ({pattern.draw(rng, held_out) for _ in range(1500)} for held_out in (False, True))
    assert ("afk", "x:0.0.3") in held
    assert (len(train), len(held)) == (33, 7)  # those whose indices add up to 3, of 5 * 2 * 4


def test_a_range_of_numbers_too_short_to_be_split_is_refused():
    with pytest.raises(ValueError, match=r"must hold 7 or more, got 2\.\.7"):
        draw_number(random.Random(0), 2, 7, held_out=True)


def test_seed_decides_every_byte(corpus, held_out_folder, tmp_path):
    def documents(seed: int) -> list[str]:
        return list(itertools.islice(corpus.training(random.Random(seed), few_shot=True), 20))

    def content(folder) -> dict:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    assert documents(0) == documents(0) != documents(1)
    for seed in (0, 1):
        write_held_out(corpus, tmp_path / str(seed), count=210, seed=seed)
    assert content(tmp_path / "0") == content(held_out_folder)
    assert content(tmp_path / "1") != content(held_out_folder)
    files = {WORD_PROBLEMS, SHOTS_FILE, TEXT}
    files |= {f"{CHOICES}/{part}/{subject}_{part}.csv" for part in ("dev", "test") for subject in SUBJECTS}
    assert set(content(held_out_folder)) == files


def gsm8k_task(folder, shots: int, chat: bool = False) -> Gsm8k:
    return Gsm8k(folder / WORD_PROBLEMS, shots=shots, num_questions=None, chat=chat)


def mmlu_task(folder, shots: int, chat: bool = False) -> Mmlu:
    return Mmlu(folder / CHOICES, shots=shots, num_questions=None, subjects=None, chat=chat, generate=False)


def test_the_evaluations_read_the_held_out_sets(held_out_folder):
    problems, questions = gsm8k_task(held_out_folder, 5), mmlu_task(held_out_folder, 5)
    assert len(problems.questions) == 210
    assert problems.shots_from.name == SHOTS_FILE  # no question is taken away for shots
    assert len(problems.prompts[0].shots) == 5
    assert len(questions.questions) == 210
    assert {questions.group(index) for index in range(210)} == set(SUBJECTS)
    assert len(questions.prompts[0].shots) == 5
    categories = [name for name, subjects in CATEGORIES.items() if set(subjects) & set(SUBJECTS)]
    assert len(categories) == 4  # so that the table by category means something
    assert set(SUBJECTS) <= {subject for subjects in CATEGORIES.values() for subject in subjects}


@pytest.mark.parametrize("shots", [0, 5])
def test_a_training_text_is_the_evaluations_prompt_with_its_answer(corpus, tmp_path, shots):
    """What a document asks is written to files, which the evaluation reads and makes its prompt of."""
    rng = random.Random(8)
    document = corpus._completed_problem(rng, shots)
    pairs = re.findall(r"Question: (.*)\nAnswer: ((?:.+\n)*#### \d+)", document)
    assert len(pairs) == shots + 1
    for name, part in ((SHOTS_FILE, pairs[:-1] or pairs), (WORD_PROBLEMS, pairs[-1:])):
        (tmp_path / name).write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in part))
    (prompt,) = gsm8k_task(tmp_path, shots).prompts
    assert document == f"{BOS}{prompt.text()} {pairs[-1][1]}{EOS}"

    document = corpus._completed_question(rng, shots)
    subject = re.match(r".*answers\) about (.*)\.", document)[1].replace(" ", "_")
    rows = re.findall(r"(.*)\nA\. (.*)\nB\. (.*)\nC\. (.*)\nD\. (.*)\nAnswer: ([A-D])", document)
    assert len(rows) == shots + 1
    for part, some in (("dev", rows[:-1] or rows), ("test", rows[-1:])):
        file = tmp_path / CHOICES / part / f"{subject}_{part}.csv"
        file.parent.mkdir(parents=True)
        with file.open("w", newline="") as stream:
            csv.writer(stream).writerows(some)
    (prompt,) = mmlu_task(tmp_path, shots).prompts
    assert document == f"{BOS}{prompt.text()} {rows[-1][5]}{EOS}"


def test_a_training_conversation_is_what_the_chat_template_makes(corpus, tokenizer, held_out_folder):
    """Both evaluations' conversations, with their answer, have the form of the training's."""
    turns = (
        (gsm8k_task(held_out_folder, 2, chat=True), gsm8k.INSTRUCTION),
        (mmlu_task(held_out_folder, 2, chat=True), mmlu.INSTRUCTION),
    )
    for task, instruction in turns:
        messages = task.prompts[0].messages()
        text = tokenizer.decode(encode_chat(tokenizer, messages))
        assert (
            text
            == BOS
            + "".join(
                f"{USER}{ask['content']}{ASSISTANT}{answer['content']}{EOS}"
                for ask, answer in zip(messages[::2], messages[1::2])
            )
            + f"{USER}{messages[-1]['content']}{ASSISTANT}"
        )
        assert messages[0]["content"].startswith(instruction)
    rng = random.Random(9)
    conversations = [corpus._chat(rng, 1) for _ in range(60)]
    for instruction in (gsm8k.INSTRUCTION, mmlu.INSTRUCTION):
        assert any(text.startswith(BOS + USER + instruction) for text in conversations)
    assert all(text.count(USER) == text.count(ASSISTANT) == text.count(EOS) == 2 for text in conversations)
    assert any(re.search(r"What is .*\?<｜Assistant｜>[^:\n]+\.<", text) for text in conversations)  # without choices


def test_training_has_none_to_five_examples_in_front_of_a_question(corpus):
    def questions(few_shot: bool) -> set[int]:
        documents = list(itertools.islice(corpus.training(random.Random(10), few_shot), 400))
        assert all(text.startswith(BOS) and text.endswith(EOS) and text.count(BOS) == 1 for text in documents)
        return {text.count("Question: ") for text in documents if text.startswith(f"{BOS}Question: ")}

    assert questions(few_shot=False) == {1}
    assert questions(few_shot=True) == {1, 2, 3, 4, 5, 6}


def test_tokenizer_gives_back_any_text_and_has_single_digits(tokenizer):
    text = "Ünï 12,345 + 67 = $9 \n\n  <<48/2=24>>24 日本 \t😀"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert not any(re.search(r"\d.*\d", tokenizer.decode([token])) for token in range(len(tokenizer)))
    assert len(tokenizer.encode("98765", add_special_tokens=False)) == 5
    assert len(tokenizer) == 600
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_c68_the_letters_are_one_token_behind_a_question(tokenizer, held_out_folder):
    prompt = mmlu_task(held_out_folder, 1).prompts[0].text()
    tokens = choice_tokens(tokenizer, prompt, mmlu.CHOICES)
    assert [tokenizer.decode([token]) for token in tokens] == [" A", " B", " C", " D"]


def test_c69_exactly_one_bos(tokenizer):
    message = [{"role": "user", "content": "hi"}]
    for ids in (encode_prompt(tokenizer, "hi"), encode_prompt(tokenizer, f"{BOS}hi"), encode_chat(tokenizer, message)):
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id  # so do other engines, which let it add its own
    system = [{"role": "system", "content": "Be brief."}, *message]
    assert tokenizer.decode(encode_chat(tokenizer, system)) == f"{BOS}Be brief.{USER}hi{ASSISTANT}"
    with pytest.raises(ValueError, match="unknown role: tool"):
        encode_chat(tokenizer, [{"role": "tool", "content": "x"}])


def test_texts_that_are_too_few_for_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="' A' did not become a token"):
        build_tokenizer(["Nothing to choose."], 300)
