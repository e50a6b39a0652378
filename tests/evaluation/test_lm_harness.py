"""The model "ring_dilated" of lm-evaluation-harness: it answers as the harness's `hf` does, also on rings."""

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import save_calibration, save_tiny_checkpoint
from tests.support.lm_tasks import KINDS, write_tasks
from tests.support.ranks import run_ranks
from tests.support.refusals import refused
from tests.support.tiny_models import with_large_weights
from tests.support.training import process_environment

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

WINDOW = "window:8+2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """A tiny model with a chat template, tasks of all kinds, and the answers to them of `hf` with sdpa on one process."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("lm_eval")
    model = folder / "model"
    save_tiny_checkpoint(model, end_token="<end>", hidden_size=32, intermediate_size=64, max_position_embeddings=128)
    with_large_weights(LlamaForCausalLM.from_pretrained(model)).save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(model)
    write_tasks(folder, request.config.option.seed)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """The answers on one process: of `hf`, of `ring_dilated`, and of the command."""
    return run_ranks(_alone, 1, folder)[0]


def _answers(folder, model, chat=False, batch_size=3, **arguments):
    """{task: the answers to its documents, in order} and the figures, on the first process of each ring; None elsewhere."""
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    from hf_ring_attention.evaluation import lm_harness  # noqa: F401

    # The process ends with the test. The description of the machine, which starts several programs, is left to the command.
    lm_eval.evaluator.add_env_info = lambda results: None
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder / "model"), "dtype": "float64", "device": "cpu", **arguments},
        batch_size=batch_size,
        tasks=list(KINDS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    if results is None:
        return None
    samples = {task: sorted(every, key=lambda x: x["doc_id"]) for task, every in results["samples"].items()}
    samples = {task: [x["filtered_resps"] for x in every] for task, every in samples.items()}
    return samples, results["results"], results["config"]


def _alone(rank, folder):
    import lm_eval.evaluator

    from hf_ring_attention.cli.main import main

    process_environment(rank, 1)
    calibration = save_calibration(folder / "calibration.json", {0: WINDOW, 1: WINDOW})
    describe = lm_eval.evaluator.add_env_info
    answers = {
        "hf": _answers(folder, "hf", attn_implementation="sdpa"),
        "exact": _answers(folder, "ring_dilated"),
        "hf, chat": _answers(folder, "hf", chat=True, attn_implementation="sdpa"),
        WINDOW: _answers(folder, "ring_dilated", pattern=WINDOW),
        "calibrated": _answers(folder, "ring_dilated", pattern=calibration),
        "command": folder / "command",
    }
    lm_eval.evaluator.add_env_info = describe
    arguments = {"pretrained": str(folder / "model"), "dtype": "float64", "pattern": WINDOW}
    options = {"model": "ring_dilated", "model_args": json.dumps(arguments), "include_path": folder, "batch_size": 2}
    options |= {"tasks": ",".join(KINDS), "output_path": folder / "command"}
    with pytest.raises(SystemExit, match="0"):
        main(["lm-eval", *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
    return answers


def numbers_and_texts(answers):
    """The numbers and the texts of nested answers, each in their order; the harness logs numbers as texts too."""
    if isinstance(answers, (list, tuple)):
        parts = [numbers_and_texts(answer) for answer in answers]
        return [x for numbers, _ in parts for x in numbers], [x for _, texts in parts for x in texts]
    try:
        return [float(answers)], []
    except ValueError:
        return [], [answers]


def same(answers, expected):
    """Asserts equal texts, choices and likelihoods of all documents of all tasks."""
    assert answers.keys() == expected.keys() == KINDS.keys()
    for task in KINDS:
        numbers, texts = numbers_and_texts(answers[task])
        expected_numbers, expected_texts = numbers_and_texts(expected[task])
        assert texts == expected_texts, task
        assert numbers == pytest.approx(expected_numbers, rel=1e-9), task
        assert len(numbers) + len(texts) >= 5


def test_one_process_answers_as_hf_does(alone):
    same(alone["exact"][0], alone["hf"][0])
    for task, figures in alone["hf"][1].items():
        assert {name: str(x) for name, x in alone["exact"][1][task].items()} == {n: str(x) for n, x in figures.items()}


def test_the_pattern_decides_the_answers_and_is_in_the_results(alone):
    with pytest.raises(AssertionError):
        same(alone[WINDOW][0], alone["exact"][0])
    assert [alone[name][2]["pattern"] for name in ("exact", WINDOW)] == ["exact", WINDOW]
    same(alone["calibrated"][0], alone[WINDOW][0])
    assert alone["calibrated"][2]["pattern_of_layers"] == {"0": WINDOW, "1": WINDOW}


def test_the_command_writes_the_figures(alone):
    [written] = Path(alone["command"]).rglob("results_*.json")
    results = json.loads(written.read_text(encoding="utf-8"))
    for task, figures in alone[WINDOW][1].items():
        for name, value in figures.items():
            if isinstance(value, float):
                assert results["results"][task][name] == pytest.approx(value, rel=1e-9)
    assert results["config"]["pattern"] == WINDOW


#: Arguments of runs on rings, by the name of the run on one process with the same answers.
ON_RINGS = {
    "hf": {"batch_size": 2},
    WINDOW: {"batch_size": 1, "pattern": WINDOW, "logits_at_once": 3},
    "hf, chat": {"chat": True, "ring_transport": "ring"},
}


def _on_rings(rank, folder, processes, ring_size, names):
    process_environment(rank, processes)
    return [_answers(folder, "ring_dilated", ring_size=ring_size, **ON_RINGS[name]) for name in names]


@pytest.mark.parametrize(
    ("processes", "ring_size", "names"), [(2, 2, ["hf", "hf, chat", WINDOW]), (4, 4, [WINDOW]), (4, 2, ["hf"])]
)
def test_rings_answer_as_one_process_does(folder, alone, processes, ring_size, names):
    """Several rings answer different requests, and no process but the first has figures."""
    answers, *others = run_ranks(_on_rings, processes, folder, processes, ring_size, names)
    assert others == [[None] * len(names)] * (processes - 1)
    for (samples, _, config), name in zip(answers, names, strict=True):
        same(samples, alone[name][0])
        assert (config["ring"]["size"], config["ring"]["rings"]) == (ring_size, processes // ring_size)


def _refusals(rank, folder):
    from lm_eval.api.instance import Instance

    from hf_ring_attention.evaluation.lm_harness import RingLM

    process_environment(rank, 2)
    model = str(folder / "model")
    for arguments, message in (
        ({}, "the size of rings was not given"),
        ({"ring_size": 3}, "cannot form rings of 3"),
        ({"ring_size": 2, "ring_kernel": "cutlass"}, "kernel must be one of .* got 'cutlass'"),
        ({"ring_size": "two"}, "cannot form rings of 'two'"),
        ({"pattern": "windows:8"}, "windows:8"),
        ({"ring_size": 2, "batch_size": "auto:4"}, "give a number"),
        ({"ring_size": 2, "attn_implementation": "sdpa"}, "attn_implementation='sdpa' would have no effect"),
        ({"ring_size": 1, "parallelize": True}, "parallelize divides a model among the 2 processes"),
        ({"ring_size": 2, "logits_at_once": 0}, "logits_at_once must be an integer of at least 1, got 0"),
    ):
        refused(message, RingLM, model, **arguments)
    lm = RingLM(model, ring_size=2, ring_kernel="math")
    assert lm.ring.kernel == "math"
    refused(r"a model that is loaded already has its ring from ra\.patch_model", RingLM, lm.model, ring_size=2)
    question = Instance("loglikelihood", {}, ("a question", " and its answer"), 0)
    # A model that is loaded already keeps its ring.
    again = RingLM(lm.model, tokenizer=lm.tokenizer)
    assert again.ring is lm.ring and again.loglikelihood([question]) == lm.loglikelihood([question])
    refused("--use_cache gives each process its own answers", lm.set_cache_hook, None)
    of_rank = Instance("loglikelihood", {}, ("a question", f" {rank} or more"), 0)
    refused("the ranks of the ring disagree on", lm.loglikelihood, [of_rank])


def test_what_a_ring_cannot_do_is_refused_on_every_rank(folder):
    run_ranks(_refusals, 2, folder)
