"""Bad arguments of recipes are refused while they are read, with what was expected and what came; --help needs no extras."""

import importlib
import os

import common
import finetune
import pytest
from accelerate.utils import LoggerType

from tests.support.missing import without
from tests.support.patches import replaced
from tests.support.programs import run_program
from tests.support.ranks import TIMEOUT
from tests.support.recipe_runs import RECIPES

#: The recipe, its arguments, and its error.
REFUSED = [
    ("finetune", "--tokens 1", "--tokens: a whole number of at least 2 was expected, got 1"),
    ("finetune", "--transport mail", "--transport: invalid choice: 'mail'"),
    ("finetune", "--lr nan", "--lr: a number above 0 was expected, got 'nan'"),
    ("finetune", "--warmup 5 --steps 5", "--warmup: the learning rate would rise for 5 of 5 steps and never be --lr"),
    ("finetune", "--held-out 1", "--held-out: the first token of a text is not predicted"),
    ("finetune", "--json none/f.json", "--json: there is no folder 'none'"),
    ("finetune", "--pattern window:0", "pattern 'window:0' cannot be read: Window: length must be an integer of at"),
    ("finetune", "--pattern none.json", "--pattern: there is no file 'none.json' (from "),
    ("finetune", "--pattern {calibration}", "--pattern: expected a calibration that Calibration.to_dict wrote"),
    ("finetune", "--text nofile.txt", "--text: there is no file 'nofile.txt'"),
    ("finetune", "--dataset a/b --text {file}", "--dataset: not allowed with argument --text"),
    ("finetune", "--streaming", "--streaming: it is about a data set: name one with --dataset"),
    ("finetune", "--eval-every 5", "--eval-every: there is nothing to evaluate on: keep some tokens with --held-out"),
    ("finetune", "--report-to paper", "--report-to: invalid choice: 'paper'"),
    ("finetune", "--distill --pattern window:32", "--distill: the teacher has the model's own weights"),
    ("finetune", "--model ./none", "--model: there is no folder './none'"),
    ("finetune", "--model {empty}", "--model: the folder '{empty}' holds no model: there is no config.json in it"),
    ("perplexity", "--pattern exact longnet:100/3", "multiple of dilation"),
    ("retrieval", "--depths 1.5", "--depths: numbers from 0, the beginning, to 1 were expected, got [1.5]"),
    ("ask", "--pattern windw:3", "--pattern: pattern 'windw:3'"),
    ("ask", "--answer-tokens 0", "--answer-tokens: a whole number of at least 1 was expected, got 0"),
    ("demo", "--row-tokens 63", "--row-tokens: a whole number of at least 64 was expected, got 63"),
    ("layer", "--heads 3 --kv-heads 2", "--heads: 3 does not divide by the 2 of --kv-heads"),
    ("finetune_trainer", "--max_steps 0", "--max_steps: 1 or more was expected, or -1 for --num_train_epochs, got 0"),
    ("finetune_trainer", "--learning_rate 0", "--learning_rate: a number above 0 was expected, got '0.0'"),
    ("finetune_trainer", "--per_device_train_batch_size 0", "--per_device_train_batch_size: a whole number of at"),
    ("finetune_trainer", "--eval_strategy steps", "--eval_strategy: there is nothing to evaluate on: keep some tokens"),
]


@pytest.fixture(autouse=True)
def no_obstacle(monkeypatch):
    """The model of the demo may not be installed here, and is not looked for before the arguments are read."""
    replaced(monkeypatch, common, obstacle=lambda *_: None)


@pytest.mark.parametrize(("recipe", "words", "message"), REFUSED, ids=lambda text: text if len(text) < 60 else "")
def test_bad_arguments_are_refused_while_they_are_read(recipe, words, message, places, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something is loaded or started")

    replaced(monkeypatch, common, installed_model=never)
    words = [word.format(**places) for word in words.split()]
    if recipe == "finetune_trainer":
        words += ["--use_cpu", "true"]
    with pytest.raises(SystemExit) as end:
        importlib.import_module(recipe).parse_args(words)
    assert end.value.code == 2
    assert message.format(**places) in capsys.readouterr().err


def test_texts_and_patterns_of_repeated_options_are_kept(places):
    file = str(places["file"])
    words = ["--text", file, file, "--text", file]
    assert finetune.parse_args(words).text == [file] * 3
    args = importlib.import_module("retrieval").parse_args([*words, "--pattern", "exact"])
    assert list(map(str, args.text)) == [file] * 3 and list(args.patterns) == ["exact"] and args.lengths == [1024, 2048]


@pytest.mark.parametrize("words", ["", "--steps 1", "--warmup 0", "--schedule constant --warmup 50", "--held-out 2"])
def test_finetune_takes_what_goes_together(words):
    args = finetune.parse_args(words.split())
    assert args.ranks is None and args.pattern == "exact"
    assert args.schedule == "constant" or args.warmup < args.steps


def test_trackers_that_are_not_installed_are_refused(monkeypatch, capsys):
    replaced(monkeypatch, finetune, get_available_trackers=lambda: [LoggerType.TENSORBOARD])
    assert finetune.parse_args(["--report-to", "tensorboard"]).report_to == ["tensorboard"]
    with pytest.raises(SystemExit):
        finetune.parse_args(["--report-to", "tensorboard", "comet_ml"])
    assert "--report-to: comet_ml is not installed: pip install comet-ml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "words", "package"),
    [
        ("finetune", "--lora 8", "peft>=0.21"),
        ("finetune_trainer", "--use_cpu true --lora 8", "peft>=0.21"),
        ("retrieval", "--plot a.png", "matplotlib>=3.8"),
        ("demo", "", "rich>=13"),
    ],
)
def test_options_without_their_package_say_what_to_install(recipe, words, package, monkeypatch, capsys):
    name = package.partition(">")[0]
    without(monkeypatch, name)
    if recipe == "finetune":
        finetune.parse_args([])  # It needs the package for this option alone.
    with pytest.raises(SystemExit):
        importlib.import_module(recipe).parse_args(words.split())
    assert f"needs {name}, which is not installed: pip install '{package}'" in capsys.readouterr().err


HELP = """
import runpy, sys

sys.modules.update(matplotlib=None, gguf=None)  # any import of them fails
folder, *recipes = sys.argv[1:]
for recipe in recipes:
    sys.argv = [recipe, "--help"]
    try:
        runpy.run_path(f"{folder}/{recipe}.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code, recipe
"""


def test_recipes_explain_themselves_without_extras(tmp_path):
    """What the package itself imports is in test_imports.py."""
    recipes = ["finetune", "finetune_trainer", "perplexity", "retrieval", "ask", "layer", "demo"]
    (tmp_path / "help.py").write_text(HELP)
    environment = {**os.environ, "PYTHONPATH": str(RECIPES)}
    done = run_program(tmp_path / "help.py", RECIPES, *recipes, environment=environment, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    for default in ("(default exact)", "(default exact window:512+4 pyramid:512,3)"):
        assert default in " ".join(done.stdout.split())
    for recipe in recipes:
        assert f"python recipes/{recipe}.py" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
