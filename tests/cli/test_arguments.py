"""Bad arguments of commands are refused while they are read, with what was expected and what came."""

import argparse
from pathlib import Path

import pytest
import torch

from hf_ring_attention.cli import arguments, plots
from hf_ring_attention.cli import main as cli
from hf_ring_attention.cli.commands import explain
from tests.support.missing import without

ROOT = Path(__file__).parents[2]

HEADS = "the number of query heads must be a multiple of the number of key/value heads, got 8 and 3: 8 = 2 * 3 + 2; take one"
EXPLAIN = "explain --tokens 64 --ranks 8 --heads 8 --head-dim 64"
ESTIMATE = "estimate --model {empty} --seq-len 64"
#: The arguments, and what the command line says.
REFUSED = [
    (f"{EXPLAIN} --tokens 1e30", "a number of tokens such as 4096, 128k or 1M was expected, got '1e30'"),
    (f"{EXPLAIN} --tokens {10**13}", "'--tokens': a whole number of at most 1099511627776 was expected, got 1000000"),
    (
        f"{EXPLAIN} --tokens {10**17}M",
        "'--tokens': a whole number of at most 1099511627776 was expected, got 24 digits",
    ),
    (f"{EXPLAIN} --tokens {'1' * 5000}", "'--tokens': a whole number of at most 1099511627776 was expected, got 5000"),
    (f"{EXPLAIN} --ranks {10**12}", "'--ranks': a whole number of at most 65536 was expected, got 1000000000000"),
    (f"{EXPLAIN} --heads {'1' * 5000}", "'--heads': a whole number of at most 65536 was expected, got 5000 digits"),
    (f"{EXPLAIN} --layers {10**12}", "'--layers': a whole number of at most 65536 was expected"),
    (f"{EXPLAIN} --batch-size {10**12}", "'--batch-size': a whole number of at most 65536 was expected"),
    (f"{EXPLAIN} --pattern kv0-{10**9}=exact", "at most 65536 key/value heads were expected"),
    (f"{ESTIMATE} --memory {'9' * 400}GB", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '999"),
    (f"calibrate --seed {2**32}", "'--seed': a whole number of at most 4294967295 was expected"),
    (f"{EXPLAIN} --tokens 0", "'--tokens': a whole number of at least 1 was expected, got 0"),
    (
        f"{EXPLAIN} --tokens 4kb",
        "'--tokens': a number of tokens such as 4096, 128k or 1M was expected, got '4kb'",
    ),
    (f"{EXPLAIN} --ranks 0", "'--ranks': a whole number of at least 1 was expected"),
    (f"{EXPLAIN} --heads 1.5", "'--heads': a whole number of at least 1 was expected, got '1.5'"),
    (f"{EXPLAIN} --kv-heads 0", "'--kv-heads': a whole number of at least 1 was expected, got 0"),
    (f"{EXPLAIN} --kv-heads 3", f"'--kv-heads': {HEADS} of 1, 2, 4, 8"),
    (f"{EXPLAIN} --head-dim 0", "'--head-dim': a whole number of at least 1 was expected, got 0"),
    ("explain --tokens 64 --ranks 8 --heads 8", "needed are --heads and --head-dim"),
    (
        "explain --ranks 8 --heads 8 --head-dim 64",
        "Missing option '--tokens'. 'hf-ring-attention explain --help'",
    ),
    (f"{EXPLAIN} --model {{empty}}", "'--heads': --model says it already: leave one of them out"),
    ("explain --tokens 64 --ranks 8 --model {empty}", "'--model': the folder '{empty}' holds no model"),
    (
        "explain --tokens 64 --ranks 8 --model {file}",
        "a folder or a hub id as 'owner/name' was expected, got the",
    ),
    (f"{EXPLAIN} --batch-size -1", "'--batch-size': a whole number of at least 1 was expected, got -1"),
    (
        f"{EXPLAIN} --dtype int8",
        "'--dtype': one of float32, bfloat16, float16, float64 was expected, got 'int8'",
    ),
    (
        f"{EXPLAIN} --layout striped",
        "'--layout': one of auto, contiguous, zigzag, documents was expected, got 'striped'",
    ),
    (
        f"{EXPLAIN} --transport mail",
        "'--transport': one of auto, ring, collective, heads, local was expected, got 'mail'",
    ),
    (f"{EXPLAIN} --ring-heads 2", "'--ring-heads': heads=2 needs transport='heads', got 'auto'"),
    (
        f"{EXPLAIN} --transport heads --ring-heads 3",
        "'--ring-heads': heads must be a number of ranks that divides the ring's 8, got 3",
    ),
    (f"{EXPLAIN} --pattern ring", "pattern 'ring' is not known"),
    (f"{EXPLAIN} --pattern window:x", "pattern 'window:x' cannot be read: a number was expected, got 'x'"),
    (f"{EXPLAIN} --pattern longnet:64/2", "cannot be made: Pattern: no branch of dilation 1"),
    (f"{EXPLAIN} --nothing", "No such option: --nothing"),
    ("explode", "No such command 'explode'. 'hf-ring-attention --help' shows what it takes"),
    ("", "Missing command. 'hf-ring-attention --help' shows what it takes"),
    (
        "models lama",
        "'TYPE': 'lama' is no model type of the Transformers release that was tested: did you mean llama",
    ),
    ("perplexity {empty} {file} --device tpu", "'--device': 'cpu' or 'cuda' was expected, got 'tpu'"),
    (f"{ESTIMATE} --memory 80", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '80'"),
    (f"{ESTIMATE} --memory 0GB", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '0GB'"),
    (
        "perplexity {empty} {file} --plot a.txt",
        "'--plot': a file that ends in one of .png, .svg, .pdf was expected, got 'a.txt'",
    ),
    (
        "estimate --model {empty} --seq-len 64 --plot {file}",
        "'--plot': a file that ends in one of .png, .svg, .pdf was",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda text: text if len(text) < 60 else "")
def test_bad_arguments_are_refused_while_they_are_read(words, message, places, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something is loaded or started")

    monkeypatch.setattr(explain, "explain", never)
    with pytest.raises(SystemExit) as end:
        cli.main([word.format(**places) for word in words.split()])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message.format(**places) in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(places, capsys):
    with pytest.raises(SystemExit):
        cli.main(["perplexity", str(places["empty"]), str(places["file"]), "--device", "cuda"])
    said = capsys.readouterr().err
    assert f"'--device': torch {torch.__version__} " in said and "on this machine: take 'cpu'" in said


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (arguments.at_least(2, multiple_of=4), "12", 12),
        (arguments.at_least(0, most=7), "+7", 7),
        (arguments.positive, "1e-4", 1e-4),
        (arguments.device, "cpu", "cpu"),
    ],
)
def test_types_take_what_they_say(kind, text, value):
    assert kind(text) == value
    for bad in ("", "x", "-4", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="was expected, got"):
            kind(bad)


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1.5 TiB", 3 * 2**39), ("512MB", 512 * 10**6)]
)
def test_sizes_of_memory(text, size):
    assert arguments.memory_size(text) == size


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    without(monkeypatch, "matplotlib")
    with pytest.raises(
        ModuleNotFoundError, match="a picture needs matplotlib, which is not installed: pip install 'mat"
    ):
        plots.plot_training([1.0], tmp_path / "loss.png")


def test_versions_of_extras_are_those_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    for requirement in arguments.EXTRAS.values():
        assert f'"{requirement.strip(chr(39))}"' in project
