"""Commands refuse a bad argument while they parse it; the error names the expected value and the given value."""

import argparse
from pathlib import Path

import pytest

from hf_ring_attention.cli import explain, main, options
from tests.support.missing import without

ROOT = Path(__file__).parents[2]

EXPLAIN = "explain --tokens 64 --ranks 8 --heads 8 --head-dim 64"
ESTIMATE = "estimate --model {empty} --tokens 64"
#: The arguments, and the error.
REFUSED = [
    (f"{EXPLAIN} --tokens 1e30", "--tokens: a number of tokens such as 4096, 128k or 1M was expected, got '1e30'"),
    (f"{EXPLAIN} --tokens 0", "--tokens: a whole number of at least 1 was expected, got 0"),
    (f"{EXPLAIN} --tokens {10**13}", "--tokens: a whole number of at most 1099511627776 was expected, got 1000000"),
    (f"{EXPLAIN} --tokens {'1' * 5000}", "--tokens: a number of tokens such as 4096, 128k or 1M was expected, got '11"),
    (f"{EXPLAIN} --heads 1.5", "--heads: a whole number of at least 1 was expected, got '1.5'"),
    (f"{EXPLAIN} --pattern kv0-{10**9}=exact", "at most 65536 key/value heads were expected"),
    (f"calibrate --model a --text {{file}} --seed {2**32}", "--seed: a whole number of at most 4294967295"),
    (f"{EXPLAIN} --kv-heads 3", "--kv-heads: a number that divides the 8 query heads was expected, got 8 = 2 * 3 + 2"),
    ("explain --tokens 64 --ranks 8 --heads 8", "give --heads and --head-dim"),
    ("explain --ranks 8 --heads 8 --head-dim 64", "are required: --tokens (see hf-ring-attention explain --help)"),
    (f"{EXPLAIN} --model {{empty}}", "--heads: --model has it already: leave one of them out"),
    ("explain --tokens 64 --ranks 8 --model {empty}", "--model: the folder '{empty}' has no config.json"),
    ("explain --tokens 64 --ranks 8 --model {file}", "is not a valid JSON file"),
    (f"{EXPLAIN} --dtype int8", "--dtype: invalid choice: 'int8' (choose from "),
    (f"{EXPLAIN} --ring-heads 2", "--ring-heads: heads=2 needs transport='heads', got 'auto'"),
    (f"{EXPLAIN} --transport heads --ring-heads 3", "--ring-heads: heads must be a divisor of the ring's"),
    (f"{EXPLAIN} --transport local", "transport='local' serves 1 rank, got 8"),
    (f"{EXPLAIN} --pattern window:x", "pattern 'window:x' cannot be read: a number was expected, got 'x'"),
    (f"{EXPLAIN} --pattern longnet:64/2", "cannot be read: Pattern: no branch of dilation 1"),
    (f"{EXPLAIN} --documents 60,8", "--documents: a row has 64 tokens, and the documents 60 + 8 = 68"),
    (f"{EXPLAIN} --nothing", "unrecognized arguments: --nothing (see hf-ring-attention --help)"),
    ("explode", "invalid choice: 'explode'"),
    ("", "the following arguments are required: COMMAND (see hf-ring-attention --help)"),
    ("models lama", "TYPE: 'lama' is not a model type of Transformers"),
    (f"{ESTIMATE} --memory 80", "--memory: a size of memory such as 80GB or 80GiB was expected, got '80'"),
    (f"{ESTIMATE} --memory {'9' * 400}GB", "--memory: a size of memory such as 80GB or 80GiB was expected, got '999"),
    (f"{ESTIMATE} --json {{file}}", "--json: a file that ends in .json was expected, got '{file}'"),
    (f"{ESTIMATE} --plot {{file}}", "--plot: a file that ends in .png or .svg or .pdf was expected, got '{file}'"),
    (f"{ESTIMATE} --plot none/a.png", "--plot: there is no folder 'none' for 'a.png': make it first"),
    (
        "perplexity --model a --text {file} --pattern no.json",
        "--pattern: no.json cannot be read (from {empty}): No such",
    ),
    ("check --ranks 3", "--ranks: a number that divides the 2 processes was expected, got 3"),
    ("plot pattern", "a pattern such as window:512+4, or --model, was expected"),
    ("plot pattern --pattern exact --heads 2 --head 2", "--head: heads are numbered 0 to 1, got 2"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda text: text if len(text) < 60 else "")
def test_bad_arguments_are_refused_while_they_are_read(words, message, places, ended, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something is loaded or started")

    monkeypatch.setenv("WORLD_SIZE", "2")
    if "--transport local" not in words:  # `explain` itself refuses it.
        monkeypatch.setattr(explain, "explain_layers", never)
    status, _, error = ended([word.format(**places) for word in words.split()])
    assert status == 2 and message.format(**places) in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "tokens", "rest"),
    [
        ("a b --tokens 1k 2k,3k", [1024, 2048, 3072], ["a", "b"]),
        ("--tokens 1k 2k a b", [1024, 2048], ["a", "b"]),
        ("a --tokens 1k b", [1024], ["a", "b"]),
        ("--model a --tokens=7 --text {file} --trust-remote-code 8", [7], ["8"]),
    ],
)
def test_numbers_end_where_other_words_begin(words, tokens, rest, places):
    args = main.command_parser().parse_args(f"perplexity {words}".format(**places).split())
    assert (args.tokens, args.words) == (tokens, rest)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (options.at_least(0, most=7), "+7", 7),
        (options.token_count(), "128k", 128 * 1024),
        (options.comma_list(options.token_count()), "1k, 2k", [1024, 2048]),
        (options.above_zero(), "1e-4", 1e-4),
        (options.memory_size, "80GiB", 80 * 2**30),
        (options.memory_size, "1.5 TiB", 3 * 2**39),
    ],
)
def test_types_take_what_they_say(kind, text, value):
    assert kind(text) == value
    for bad in ("", "x", "-4", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="was expected, got"):
            kind(bad)


PICTURE = "plot pattern --pattern exact --plot a.png"


@pytest.mark.parametrize(
    ("package", "words", "purpose"), [("rich", "--version", "the command line"), ("matplotlib", PICTURE, "a picture")]
)
def test_a_missing_package_is_named_with_its_pip_command(package, words, purpose, monkeypatch, places, refusal):
    without(monkeypatch, package)
    told = f"{purpose} needs {package}, which is not installed: pip install '{options.EXTRAS[package]}'"
    assert told in refusal(words)


def test_versions_of_extras_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    for requirement in options.EXTRAS.values():
        assert f'"{requirement}"' in project
