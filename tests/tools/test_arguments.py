"""Bad arguments of commands are refused while they are read, with what was expected and what came."""

import argparse
from pathlib import Path

import pytest
import torch

from hf_ring_attention.tools import arguments, cli, plots
from hf_ring_attention.tools.commands import bench, explain
from tests.support.missing import without

ROOT = Path(__file__).parents[2]

HEADS = "the number of query heads must be a multiple of the number of key/value heads, got 8 and 3: 8 = 2 * 3 + 2; take one"
EXPLAIN = "explain --tokens 64 --ranks 8 --heads 8 --head-dim 64"
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
    (f"bench --memory {'9' * 400}GB", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '999"),
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
    (
        "bench typing",
        "ideal, ring-memory, overlap, step-memory, estimate, scaling, hybrids, peers was expected, got",
    ),
    ("bench --ranks 1", "'--ranks': a whole number of at least 2 was expected, got 1"),
    ("bench --heads 0", "'--heads': a whole number of at least 1 was expected, got 0"),
    ("bench --kv-heads 3", f"'--kv-heads': {HEADS} of 1, 2, 4, 8"),
    ("bench --kv-heads 0", "'--kv-heads': a whole number of at least 1 was expected, got 0"),
    ("bench --head-dim 0", "'--head-dim': a whole number of at least 1 was expected, got 0"),
    ("bench --repeats 0", "'--repeats': a whole number of at least 1 was expected, got 0"),
    ("bench --device tpu", "'--device': 'cpu' or 'cuda' was expected, got 'tpu'"),
    (
        "bench --lengths 512,100",
        "'--lengths': a multiple of 16 was expected, got 100 = 6 * 16 + 4: take 96 or 112",
    ),
    ("bench --lengths 0", "'--lengths': a whole number of at least 16 was expected, got 0"),
    ("bench ideal --heads 3", "gives each rank its share of the heads, and 3 heads = 1 * 2 ranks + 1"),
    ("bench --ranks 4 --ring-tokens 100", "2 * 4 = 8 equal pieces, and 100 = 12 * 8 + 4: take 104"),
    ("bench overlap --ranks 1", "expected, got 1: transport, ideal, overlap and hybrids need several ranks"),
    (
        "bench scaling --scaling-ranks 1,4,6 --ring-tokens 100",
        "'--ring-tokens': zigzag cuts the row into 2 * 4 = 8 equal pieces, and 100 = 12 * 8 + 4: take 120",
    ),
    ("bench --scaling-ranks 1,0", "'--scaling-ranks': a whole number of at least 1 was expected, got 0"),
    ("bench --step-lengths 4k,8", "'--step-lengths': a whole number of at least 16 was expected, got 8"),
    (
        "bench step-memory --ranks 32 --step-lengths 16",
        "each of 32 ranks needs one token at least, and a row has 16",
    ),
    ("bench step-memory --head-dim 7", "turns pairs of numbers by position, and 7 = 3 * 2 + 1: take 8"),
    ("bench --memory 80", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '80'"),
    ("bench --memory 0GB", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '0GB'"),
    (
        "bench speed model --plots {empty}",
        "'--plots': speed, model: no picture; step-memory, scaling, peers have one",
    ),
    ("bench scaling --plots {file}", "'--plots': a folder was expected, but '{file}' is a file"),
    ("bench --longnet-tokens 0", "'--longnet-tokens': a whole number of at least 1 was expected, got 0"),
    ("bench --rank-tokens 5", "'--rank-tokens': a multiple of 2 was expected, got 5 = 2 * 2 + 1: take 4 or 6"),
    ("bench --memory-ranks 2,0", "'--memory-ranks': a whole number of at least 1 was expected, got 0"),
    ("bench --decode-tokens 0", "'--decode-tokens': a whole number of at least 1 was expected, got 0"),
    ("bench peers --peer-tokens 0", "'--peer-tokens': a whole number of at least 1 was expected, got 0"),
    ("bench decode --model {empty}", "'--model': the folder '{empty}' holds no model"),
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

    monkeypatch.setattr(bench, "MEASUREMENTS", dict.fromkeys(bench.PARTS, never))
    monkeypatch.setattr(explain, "explain", never)
    with pytest.raises(SystemExit) as end:
        cli.main([word.format(**places) for word in words.split()])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message.format(**places) in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--device", "cuda"])
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


def test_pictures_of_the_benchmark_need_matplotlib_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    without(monkeypatch, "matplotlib")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "scaling", "--plots", str(tmp_path / "pictures")])
    assert end.value.code == 2 and not (tmp_path / "pictures").exists()
    assert "matplotlib, which is not installed: pip install 'matplotlib>=3.8'" in capsys.readouterr().err


def test_a_folder_of_pictures_that_cannot_be_made_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "MEASUREMENTS", {})
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "scaling", "--plots", "/proc/pictures"])
    assert end.value.code == 2
    assert "'--plots': the folder '/proc/pictures' cannot be made: " in capsys.readouterr().err


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
