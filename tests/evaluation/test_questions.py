"""Questions fill their length, hide what they ask for where they say, and their answers follow from their texts alone."""

import random
import re
from collections import Counter
from dataclasses import replace

import documents
import pytest
import torch

from hf_ring_attention.evaluation.inputs import EvaluationInputs
from hf_ring_attention.evaluation.jobs import EvaluationPlan, check_plan, expanded_tasks, jobs_of
from hf_ring_attention.evaluation.questions import CANDIDATES, NOISE, PromptWriter, most_units, question_of
from hf_ring_attention.evaluation.texts import EvaluationText, python_topics, sentences_of, text_pieces
from hf_ring_attention.evaluation.tracing import RETRIEVAL, RULER, retrieval_task
from hf_ring_attention.evaluation.words import FEWEST_WORDS, word_list
from tests.support.evaluation import inputs_of, load, made_up_text, save_checkpoint

LENGTH = 4000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_checkpoint(folder)
    return load(folder)[1]


def plan_of(**changes):
    return EvaluationPlan(**{"patterns": ("exact",), "tasks": ("passkey",), "lengths": (LENGTH,), **changes})


@pytest.fixture(scope="module")
def inputs(tokenizer, request):
    """Those of all tasks, from the seed of the run."""
    rng = random.Random(request.config.option.seed)
    return inputs_of(tokenizer, plan_of(tasks=RETRIEVAL, seed=rng.randrange(10**6)), rng.randrange(10**6))


def context_of(question):
    """The text between the instructions and what is asked; of tasks with an example, that behind it."""
    return question.draft.text.split("\n\n")[-2]


def numbers_of(key, text):
    return re.findall(rf"The secret number of {key} is (\d+)\.", text)


def keys_asked(question):
    asked = re.search(r"numbers? of (.*)\?$", question.draft.text).group(1)
    return re.split(", | and ", asked)


def answers_by_reading(question):
    """The answers to a question, found in its text by a rule of the task's own."""
    task, text = question.task.name, context_of(question)
    if task == "passkey":
        return set(re.findall(r"pass key is (\d{5})", text))
    if task == "variable_tracking":
        value = re.search(r"the value (\d+)\?$", question.draft.text).group(1)
        assigned = dict(re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE))
        holders = set()
        for name, source in assigned.items():
            while source in assigned:
                source = assigned[source]
            if source == value:
                holders.add(name)
        return holders
    if task == "common_words":
        return {word for word, _ in Counter(re.findall(r"\d+\. (\w+)", text)).most_common(10)}
    if task == "frequent_words":
        return {word for word, _ in Counter(word for word in text.split() if word != "...").most_common(3)}
    return {number for key in keys_asked(question) for number in numbers_of(key, text)}


@pytest.mark.parametrize("name", RETRIEVAL)
def test_answers_follow_from_the_text(inputs, name):
    for number in range(3):
        question = inputs.question(name, LENGTH, 0.5, number)
        assert answers_by_reading(question) == set(question.draft.answers), question.draft.text
        sizes = {"niah_multivalue": 4, "niah_multiquery": 4, "variable_tracking": 5, "common_words": 10}
        assert len(question.draft.answers) == {**sizes, "frequent_words": 3}.get(name, 1)


@pytest.mark.parametrize("name", RETRIEVAL)
def test_the_first_candidate_is_right_and_the_others_are_not(inputs, name):
    question = inputs.question(name, LENGTH, 0.25, 1)
    right, *others = [set(candidate.split(", ")) for candidate in question.draft.candidates]
    assert right == set(question.draft.answers)
    assert len(others) == CANDIDATES - 1 and all(not other >= right for other in others)
    text = inputs.writer.text(question.draft)
    for candidate, ids in zip(question.draft.candidates, question.candidate_ids):
        assert inputs.tokenizer.decode([*question.prompt, *ids]) == f"{text} {candidate}"


@pytest.mark.parametrize("name", RETRIEVAL)
def test_prompts_fill_their_length_up_to_a_unit(inputs, name):
    question = inputs.question(name, LENGTH, 0.0, 2)
    tokens = len(question.prompt) + question.task.new_tokens
    seed = f"{inputs.plan.seed} {name} {LENGTH} 0.0 2"
    wider = question.task.build(question.units + 1, random.Random(seed), inputs.materials, 0.0)
    assert tokens <= LENGTH < len(inputs.writer.ids(inputs.writer.text(wider))) + question.task.new_tokens


def test_equal_seeds_make_equal_questions_and_others_others(tokenizer):
    tasks = ("needle", "variable_tracking", "frequent_words")
    first, again, other = (inputs_of(tokenizer, plan_of(tasks=tasks, seed=seed)) for seed in (1, 1, 2))
    for name in tasks:
        question = first.question(name, LENGTH, 0.5, 0)
        assert question == again.question(name, LENGTH, 0.5, 0)
        assert question.prompt != other.question(name, LENGTH, 0.5, 0).prompt
        assert question.prompt != first.question(name, LENGTH, 0.5, 1).prompt


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.9, 1.0])
def test_needles_stand_at_their_depth(inputs, depth):
    passkey, needle = (inputs.question(name, LENGTH, depth, 0) for name in ("passkey", "needle"))
    before = context_of(passkey).partition("The pass key")[0]
    assert before.count(NOISE) == int(depth * passkey.units)
    text = context_of(needle)
    assert text.index("The secret number") == pytest.approx(depth * len(text), abs=0.05 * len(text))
    own = set(sentences_of(inputs.texts))
    needles = [part for part in re.split(r"(?<=[.])\s+", text) if part not in own]
    assert needles == [f"The secret number of {keys_asked(needle)[0]} is {needle.draft.answers[0]}."]


def test_chats_are_asked_by_the_template(tokenizer):
    inputs = inputs_of(tokenizer, plan_of(chat=True))
    question = inputs.question("passkey", LENGTH, 0.5, 0)
    text = tokenizer.decode(question.prompt)
    assert text.startswith("<user>A pass key is hidden") and text.endswith(
        "What is the pass key?<assistant>The pass key is"
    )


def test_most_units_of_random_sizes(rng):
    for _ in range(200):
        step, least, room = rng.randint(1, 20), rng.randint(1, 6), rng.randint(1, 400)
        sizes = [rng.randint(0, 9) for _ in range(1)]
        found = most_units(lambda n, first=sizes[0], each=step: first + each * n, room, least)
        expected = (room - sizes[0]) // step
        assert found == (expected if expected >= least else None)
    assert most_units(lambda n: min(n, 10), 100, 1) >= 10, "a size that stops growing ends the search"


def test_a_length_without_room_is_refused_with_what_it_takes(inputs):
    with pytest.raises(ValueError, match=r"common_words: a question takes \d+ tokens at least, 120 of them .* is 900"):
        inputs.question("common_words", 900, None, 0)


def test_words_are_those_of_the_texts_or_of_python(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wonderwords" else find(name))
    text = EvaluationText("book", made_up_text(1))
    listed = word_list([text])
    assert (listed.name, set(listed.words)) == ("book", set(re.findall(r"\w+", text.content)))
    short = word_list([EvaluationText("note", "too few words here")])
    assert short.name.startswith("pydoc topics of Python") and len(short.words) > FEWEST_WORDS


def test_the_text_that_is_read_by_default_is_the_same_with_each_python():
    """The figures of README.md and of the recipes are of this text."""
    assert (python_topics().checksum, len(python_topics().content)) == ("71f2ff5d99bdc1f9", 465126)
    assert documents.texts(None) == [python_topics().content]


def test_words_of_the_package_where_it_is_installed():
    pytest.importorskip("wonderwords", reason="an extra: pip install 'hf-ring-attention[words]'")
    listed = word_list([EvaluationText("book", made_up_text(1))])
    assert listed.name.startswith("wonderwords ") and {"house", "walk"} <= set(listed.words)


def size_of(piece):
    """The bytes of the tokens that are scored: all but the first, where no other opens the text."""
    return piece.size_of(torch.arange(len(piece.ids)) >= max(1, piece.opening))


def test_pieces_are_neighbours_and_their_bytes_are_those_of_the_text(tokenizer):
    content = "naïve café " * 40
    text = EvaluationText("menu", content)
    pieces = text_pieces(text, tokenizer, 100, 3)
    encoded = content.encode()
    assert [piece.ids.tolist() for piece in pieces] == [
        tokenizer(content).input_ids[first : first + 100] for first in (0, 100, 200)
    ]
    for number, piece in enumerate(pieces):  # Tokens are bytes; a letter of two bytes may be cut at either end.
        assert abs(size_of(piece) - len(encoded[100 * number + 1 : 100 * number + 100])) <= 1
    (whole,) = text_pieces(text, tokenizer, 10_000, 3)
    assert (whole.name, len(whole.ids), size_of(whole)) == ("menu", len(encoded), len(encoded) - 1)
    with pytest.raises(ValueError, match="menu has 1 token"):
        text_pieces(EvaluationText("menu", "a"), tokenizer, 10, 1)


def test_ruler_means_all_of_its_tasks():
    assert expanded_tasks(["passkey", "ruler", "niah_single"]) == ("passkey", *RULER)
    with pytest.raises(ValueError, match=r"or ruler for .* was expected, got 'paskey'"):
        expanded_tasks(["paskey"])


def test_every_figure_has_one_job():
    plan = plan_of(
        patterns=("exact", "window:64+4"),
        tasks=("perplexity", "longppl", "passkey", "niah_single"),
        lengths=(64, 128),
        depths=(0.0, 1.0),
        samples=5,
        batch=2,
    )
    keys = [key for job in jobs_of(plan, {task: {64: 3, 128: 2} for task in plan.tasks}) for key in job.keys]
    assert len(keys) == len(set(keys)) == 2 * (2 * (3 + 2) + 2 * (2 + 1) * 5)


REFUSED = {
    "own without one": ({"patterns": ("own",)}, "pattern 'own': the model's config has no pattern"),
    "no tasks": ({"tasks": ()}, "tasks: one at least was expected"),
    "a length twice": ({"lengths": (64, 64)}, "lengths: each is to be named once, got 64, 64"),
    "too long": ({"lengths": (64, 9000)}, "lengths: the model has positions for 8192 tokens, and a length is 9000"),
    "a depth twice": ({"depths": (0.5, 0.50)}, "depths: each is to be named once, got 0.5, 0.5"),
    "a depth beyond": ({"depths": (0.0, 1.5)}, r"depths: numbers from 0, .* got \[0.0, 1.5\]"),
    "no depth": ({"depths": ()}, "depths: numbers from 0"),
    "a long stride": ({"stride": 5000}, "stride: it must be at most the shortest length, 4000 tokens, got 5000"),
    "a long short context": (
        {"tasks": ("longppl",)},
        "longppl: .* a short context of 4096 tokens, and a length is 4000",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_evaluated_is_refused_at_once(tokenizer, case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        check_plan(plan_of(**changes), positions=8192, own_pattern=False, writer=PromptWriter(tokenizer))


def test_texts_and_tokenizers_that_do_not_serve_are_refused(tokenizer):
    plan = plan_of(tasks=("longppl",), lengths=(1000,), short_context=500)
    with pytest.raises(ValueError, match="longppl: book has 99 tokens, and the short context has 500"):
        EvaluationInputs(tokenizer, [EvaluationText("book", "a" * 99)], plan, positions=8192)
    with pytest.raises(ValueError, match="windw:3"):
        EvaluationInputs(tokenizer, [EvaluationText("book", "a b")], plan_of(patterns=("windw:3",)))
    plan = plan_of(tasks=("needle",), lengths=(1000,))
    with pytest.raises(ValueError, match="needle: it hides needles among the sentences of blank, where there is none"):
        EvaluationInputs(tokenizer, [EvaluationText("blank", " ")], plan)
    with pytest.raises(ValueError, match="does not tell where its tokens stand"):
        text_pieces(EvaluationText("book", "abc"), object(), 10, 1)

    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="chat: the model's tokenizer has no chat template"):
        check_plan(
            plan_of(chat=True), positions=None, own_pattern=False, writer=replace(PromptWriter(Bare()), chat=True)
        )


def test_a_question_does_not_depend_on_those_before_it(inputs):
    how = {"seed": inputs.plan.seed, "materials": inputs.materials, "writer": inputs.writer}
    alone = question_of(retrieval_task("needle", LENGTH), LENGTH, 0.5, 3, **how)
    assert alone == inputs.question("needle", LENGTH, 0.5, 3)
