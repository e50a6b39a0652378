"""The recipes run as their docstrings say, on small input, and their figures hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RECIPES = Path(__file__).parents[2] / "recipes"
NO_DEEPSPEED = "DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
AS_GPUS = Path(__file__).parents[1] / "support" / "as_gpus.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a byte-level tokenizer, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again. " * 400)
    assert AutoTokenizer.from_pretrained(folder / "model")("fox").input_ids
    return folder


#: What starts two processes: Accelerate's launcher, with options for all that it would guess; torch's; and the files of
#: recipes/accelerate, whose plugins act where Accelerate takes the processes for GPUs.
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
LAUNCHERS = {
    "accelerate": [*ACCELERATE, *"--multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no".split()],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
}
for plugin in ("fsdp2", "zero3"):
    file = RECIPES / "accelerate" / f"{plugin}.yaml"
    LAUNCHERS[plugin] = [*ACCELERATE, "--config_file", str(file), "--mixed_precision", "no", str(AS_GPUS)]


def run(recipe, *arguments, launcher=None, timeout=150):
    """What a recipe prints, on one process or on two."""
    environment = dict(os.environ, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, *LAUNCHERS.get(launcher, []), str(RECIPES / recipe), *map(str, arguments)]
    done = subprocess.run(command, env=environment, timeout=timeout, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_perplexity_is_the_same_from_two_processes(folder, tmp_path):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--tokens", 515]
    options += ["--patterns", "exact", "pyramid:32,3,2", "longnet:64/1,256/4"]
    figures = {}
    for processes, launcher in ((1, None), (2, "torchrun")):
        file = tmp_path / f"{processes}.json"
        out = run("perplexity.py", *options, "--json", file, launcher=launcher)
        assert f"{processes} process(es)" in out
        figures[processes] = json.loads(file.read_text())
    assert figures[2]["world_size"] == 2
    for one, two in zip(figures[1]["figures"], figures[2]["figures"], strict=True):
        assert one["tokens"] == two["tokens"] == 514
        assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
        assert len(two["token_nll"]) == 515
    values = [row["perplexity"] for row in figures[1]["figures"]]
    assert len(set(values)) == 3, "patterns were not applied"
    assert figures[1]["figures"][0]["flop_share"] == 1
    assert 0.1 < figures[1]["figures"][2]["flop_share"] < 0.5


FINETUNE = ["--pattern", "pyramid:32,3,2", "--steps", 5, "--seq-len", 250, "--accumulate", 2, "--held-out", 200]
FINETUNE += ["--lr", "1e-2", "--warmup", 1]


def finetune(folder, output, *options, launcher=None):
    """Its figures, and what it prints."""
    file = output / "figures.json"
    options = ["--model", folder / "model", "--text", folder / "text.txt", *FINETUNE, *options]
    out = run("finetune.py", *options, "--output", output, "--json", file, launcher=launcher)
    assert LlamaForCausalLM.from_pretrained(output).config.ring_dilated["pattern"]["branches"]
    assert (output / "loss.png").stat().st_size > 1000
    return json.loads(file.read_text()), out


@pytest.fixture(scope="module")
def by_one_process(folder):
    output = folder / "one"
    output.mkdir()
    figures, out = finetune(folder, output)
    assert "rank 0: peak memory" in out
    assert figures["perplexity_after"] < 0.9 * figures["perplexity_before"]
    return figures


def assert_same_steps(figures, expected):
    for step, other in zip(figures["steps"], expected["steps"], strict=True):
        assert step["tokens"] == other["tokens"] == 2 * 249
        assert step["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert figures["perplexity_after"] == pytest.approx(expected["perplexity_after"], rel=1e-5)


def assert_same_parameters(output, expected, tolerance=1e-3):
    """By default within what Adam makes of a rounding where a gradient is next to nothing."""
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (output, expected))
    for name, x in ours.items():
        assert float((x - theirs[name]).abs().max()) <= tolerance * float(theirs[name].abs().max()), name


def test_finetune_takes_the_same_steps_on_two_processes(folder, by_one_process, tmp_path):
    figures, out = finetune(folder, tmp_path, "--ring-size", 2, "--save-every", 3, launcher="accelerate")
    assert "rank 1: peak memory" in out
    assert_same_steps(figures, by_one_process)
    # The checkpoint is that of the third step.
    figures, out = finetune(folder, tmp_path, "--ring-size", 2, "--resume", launcher="accelerate")
    assert "going on after step 3" in out
    assert_same_steps(figures, by_one_process)


@pytest.mark.parametrize("plugin", ["fsdp2", "zero3"])
def test_finetune_with_sharded_parameters(plugin, folder, by_one_process, tmp_path):
    if plugin == "zero3":
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    figures, _ = finetune(folder, tmp_path, "--ring-size", 2, "--checkpointing", "--offload", launcher=plugin)
    assert_same_steps(figures, by_one_process)
    assert_same_parameters(tmp_path, folder / "one")


@pytest.fixture(scope="module")
def by_the_trainer(folder):
    output = folder / "trainer"
    return train(folder, output, 1, None)


def train(folder, output, ring_size, launcher):
    """The losses of a run by the Trainer."""
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--pattern", "pyramid:32,3,2"]
    options += [
        "--seq_len",
        250,
        "--max_steps",
        3,
        "--held_out",
        2,
        "--learning_rate",
        "1e-2",
        "--disable_tqdm",
        "true",
    ]
    options += ["--ring_size", ring_size, "--output_dir", output, "--save_strategy", "steps", "--save_steps", 3]
    out = run("finetune_trainer.py", *options, launcher=launcher)
    assert f"rank {ring_size - 1}: peak memory" in out and "eval_perplexity" in out
    assert LlamaForCausalLM.from_pretrained(output).config.ring_dilated["pattern"]["branches"]
    state = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize("launcher", ["torchrun", "fsdp2", "zero3"])
def test_finetune_by_the_trainer(launcher, folder, by_the_trainer, tmp_path):
    if launcher == "zero3":
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    assert train(folder, tmp_path, 2, launcher) == pytest.approx(by_the_trainer, rel=1e-6)
    assert_same_parameters(tmp_path, folder / "trainer")


def test_benchmark_prints_its_tables(folder, tmp_path):
    file = tmp_path / "bench.json"
    options = ["--tokens", 4096, "--heads", 4, "--kv-heads", 2, "--longnet", "128/1,1024/8", "--pyramid", "64,2"]
    options += ["--repeats", 1, "--model-repeats", 1]
    options += ["--model", folder / "model", "--decode-tokens", 100, "--decode-repeats", 1]
    out = run("benchmark.py", *options, "--json", file)
    figures = json.loads(file.read_text())
    assert "of the floor" in out
    assert [row["attention"] for row in figures["speed"]] == ["sdpa", "longnet:128/1,1024/8", "pyramid:64,2"]
    assert all(row["bytes"] > 2**20 for row in figures["memory"])
    assert figures["model_ratio"] > 0
    assert [row["pattern"] for row in figures["decode"]] == ["longnet:128/1,1024/8", "pyramid:64,2", "exact"]
    assert all(row["ratio"] > 0 for row in figures["decode"])


def test_a_pattern_that_cannot_be_read_ends_with_the_forms_that_can():
    command = [sys.executable, str(RECIPES / "perplexity.py"), "--patterns", "longnet:100/3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "multiple of dilation" in done.stderr
    assert "pyramid:512,3" in done.stderr
