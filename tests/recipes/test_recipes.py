"""The recipes run as their docstrings say, on small input, and their figures hold."""

import importlib
import json
import re
import shutil
import sys

import checkpoints
import common
import pytest
import torch
from accelerate.utils import LoggerType
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import hf_ring_attention as ra
from tests.support.as_gpus import NO_DEEPSPEED
from tests.support.ranks import run_ranks
from tests.support.recipe_runs import finetuned, launch, refused, run, save_inputs
from tests.support.releases import at_least
from tests.support.tiny_models import with_large_weights
from tests.support.tolerance import nudge_
from tests.support.training import assert_equal_runs, bounds_of, process_environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_inputs(tmp_path_factory.mktemp("tiny"), width=64, times=400)


@pytest.fixture(scope="module")
def nudged(folder):
    """The same, with each weight a rounding off: see tests.support.tolerance."""
    again = folder / "nudged"
    shutil.copytree(folder / "model", again / "model")
    shutil.copy(folder / "text.txt", again)
    nudge_(LlamaForCausalLM.from_pretrained(folder / "model")).save_pretrained(again / "model")
    return again


FINETUNE = ["--pattern", "pyramid:32,3,2", "--steps", 5, "--tokens", 250, "--accumulate", 2, "--held-out", 300]
FINETUNE += ["--lr", "1e-2", "--warmup", 1]


def finetune(folder, output, *options, **how):
    """Its figures, and what it prints."""
    file = output / "figures.json"
    options = ["--model", folder / "model", "--text", folder / "text.txt", *FINETUNE, *options]
    out = run("finetune.py", *options, "--output", output, "--json", file, **how)
    assert LlamaForCausalLM.from_pretrained(output).config.ring_dilated["pattern"] == "pyramid:32,3,2"
    return json.loads(file.read_text()), out


#: In place of the tracker of this name: it writes what it is told to a file in the current folder.
TRACKIO = """
import json


class Run:
    def log(self, values, step=None):
        with open("tracked.jsonl", "a") as file:
            file.write(json.dumps({"step": step} | values) + chr(10))

    def finish(self):
        pass


def init(project):
    assert project == "finetune"
    return Run()


config = type("Config", (), {"update": lambda self, values, **_: Run().log({"settings": values})})()
"""


@pytest.fixture(scope="module")
def by_one_process(folder):
    output = folder / "one"
    output.mkdir()
    (output / "trackio.py").write_text(TRACKIO)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(output)  # where the tracker writes
        patch.syspath_prepend(output)
        patch.setattr("accelerate.tracking._available_trackers", [LoggerType.TRACKIO])
        figures, out = finetune(folder, output, "--report-to", "trackio", "--eval-every", 2)
    first = "1 ring of 1 process, layout auto, transport auto, kernel auto, pattern pyramid:32,3,2, model "
    first += f"{folder / 'model'}; 24500 tokens in 98 rows of 250, "
    assert out.startswith(first + "100.0% full: 98 documents and parts of documents\n")
    assert "rank 0: peak memory" in out
    assert figures["perplexity_after"] < 0.9 * figures["perplexity_before"]
    return figures


def test_finetune_evaluates_and_reports_while_it_trains(folder, by_one_process):
    tracked = [json.loads(line) for line in (folder / "one" / "tracked.jsonl").read_text().splitlines()]
    assert tracked[0]["settings"]["pattern"] == "pyramid:32,3,2" and tracked[0]["settings"]["lr"] == 1e-2
    losses = [(entry["step"], entry["loss"]) for entry in tracked if "loss" in entry]
    held_out = [(entry["step"], entry["held_out/loss"]) for entry in tracked if "held_out/loss" in entry]
    steps = [(number, step["loss"]) for number, step in enumerate(by_one_process["steps"], start=1)]
    evaluations = [(int(step), loss) for step, loss in by_one_process["held_out"].items()]
    if not at_least("accelerate", "1.14"):  # Before, Accelerate does not tell this tracker the step.
        steps, evaluations = ([(None, loss) for _, loss in figures] for figures in (steps, evaluations))
    assert losses == steps and held_out == evaluations
    held_out = by_one_process["held_out"]
    assert [*held_out] == ["0", "2", "4", "5"]
    assert held_out["5"] < held_out["2"] < held_out["0"]
    assert all(step["fill"] == 1 for step in by_one_process["steps"])


def test_finetune_learns_adapters_from_a_stream_of_chats(folder, tmp_path, monkeypatch):
    """Only what the assistant says is learned, and a run that goes on takes the steps of a whole one."""
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    answer = {"role": "assistant", "content": "yes"}
    chats = [[{"role": "user", "content": "?" * (5 + n % 40)}, answer] for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    options = ["--model", model, "--dataset", tmp_path / "chats.jsonl", "--streaming", "--buffer", 20, "--tokens", 128]
    options += "--pattern window:32+2 --lora 4 --lr 1e-2 --warmup 1 --held-out 200 --save-every 2".split()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options += ["--steps", 6, "--schedule", "constant", "--output", tmp_path / "run"]
    options += ["--json", tmp_path / "figures.json"]
    out = run("finetune.py", *options, "--keep", 2)
    whole = json.loads((tmp_path / "figures.json").read_text())
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    for step in whole["steps"]:
        assert 0.1 < step["fill"] <= 1
        assert step["learned"] % len("yes\n") == 0 and 0 < step["learned"] < 128 * step["fill"] / 4
        assert step["tokens"] == pytest.approx(128 * step["fill"])
    speeds = re.search(r"(\d+) tokens/s, of which (\d+) are learned", out).groups()
    assert [f"{whole[f'{name}_per_second']:.0f}" for name in ("tokens", "learned")] == [*speeds]
    assert whole["perplexity_after"] < whole["perplexity_before"]
    assert "has adapters only: ask.py, perplexity.py and retrieval.py take it as --model" in out
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert "going on after step 4" in run("finetune.py", *options, "--resume")
    again = json.loads((tmp_path / "figures.json").read_text())
    first, second = ([step["loss"] for step in figures["steps"]] for figures in (whole, again))
    assert second == pytest.approx(first, rel=1e-5)
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run")
    trained = {name for name, x in saved.named_parameters() if "lora_B" in name and bool(x.any())}
    assert len(trained) == 2 * 7  # layers, and linear layers of each


@pytest.fixture(scope="module")
def bounds(folder, nudged, by_one_process):
    (nudged / "one").mkdir()
    finetune(nudged, nudged / "one")
    return bounds_of(finetuned(nudged / "one"), finetuned(folder / "one"))


def assert_same_steps(output, folder, bounds):
    for one in (output, folder / "one"):
        steps = json.loads((one / "figures.json").read_text())["steps"]
        assert [(step["tokens"], step["learned"]) for step in steps] == [(2 * 250, 2 * 249)] * 5
        assert [step["lr"] for step in steps][:2] == pytest.approx([0, 0.01])  # One step of warm-up.
    assert_equal_runs(finetuned(output), finetuned(folder / "one"), "finetune.py", bounds)


def test_finetune_takes_the_same_steps_on_two_processes(folder, bounds, tmp_path):
    _, out = finetune(folder, tmp_path, "--ranks", 2, "--save-every", 3, processes=2)
    assert "rank 1: peak memory" in out
    assert out.startswith(
        "1 ring of 2 processes, layout auto, transport auto, kernel auto, pattern pyramid:32,3,2, model "
    )
    assert out.count("1 ring of") == 1
    assert_same_steps(tmp_path, folder, bounds)
    # The checkpoint is that of the third step.
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint-3"]
    _, out = finetune(folder, tmp_path, "--ranks", 2, "--resume", processes=2)
    assert "going on after step 3" in out
    assert_same_steps(tmp_path, folder, bounds)
    # One ring of one process is one ring too, but goes on with nothing else than the run had.
    options = ["--model", folder / "model", "--text", folder / "text.txt", *FINETUNE, "--output", tmp_path]
    assert "has checkpoint-3 of an earlier run" in refused("finetune.py", *options)
    error = refused("finetune.py", *options, "--resume", "--lr", "2e-2")
    assert "other settings (lr 0.01 there and 0.02 here)" in error


def test_two_rings_read_what_one_accumulates(folder, bounds, tmp_path):
    finetune(folder, tmp_path, "--ranks", 1, "--accumulate", 1, processes=2)
    assert_same_steps(tmp_path, folder, bounds)


KINDS = ("_before", "_exact_before", "_after", "_exact_after")


def test_finetune_distills_from_exact_attention(folder, tmp_path):
    """With weights so large that a pattern changes what is predicted; on two processes, and from nudged weights for bounds."""
    found = {}
    for name, how in {"one": {}, "two": {"processes": 2}, "nudged": {}}.items():
        output = tmp_path / name
        model = with_large_weights(LlamaForCausalLM.from_pretrained(folder / "model"))
        (nudge_(model) if name == "nudged" else model).save_pretrained(output / "model")
        AutoTokenizer.from_pretrained(folder / "model").save_pretrained(output / "model")
        options = ["--distill", "--lora", 2, "--output", output / "run", "--json", output / "figures.json"]
        options += ["--steps", 2, "--accumulate", 1, "--warmup", 0]
        options += ["--model", output / "model", "--text", folder / "text.txt", "--ranks", how.get("processes", 1)]
        out = run("finetune.py", *FINETUNE, *options, **how)
        assert out.count("held-out perplexity of the same weights with exact attention") == 2
        figures = json.loads((output / "figures.json").read_text())
        found[name] = {
            "losses": [step["loss"] for step in figures["steps"]],
            "norms": [step["grad_norm"] for step in figures["steps"]],
            "perplexity": [figures[f"perplexity{kind}"] for kind in KINDS],
            "parameters": load_file(output / "run" / "adapter_model.safetensors"),
        }
    losses, perplexities = found["one"]["losses"], found["one"]["perplexity"]
    assert 0 < losses[-1] < losses[0] and len(set(perplexities)) == 4
    assert_equal_runs(found["two"], found["one"], "finetune.py --distill", bounds_of(found["nudged"], found["one"]))


def test_a_pattern_that_replaces_the_saved_one_is_told(folder, tmp_path):
    """By default the pattern is exact, whatever the model was saved with."""
    config = ra.patch_config(AutoConfig.from_pretrained(folder / "model"), "window:32+2")
    shutil.copytree(folder / "model", tmp_path / "model")
    config.save_pretrained(tmp_path / "model")
    options = ["--model", tmp_path / "model", "--text", folder / "text.txt", "--tokens", 64, "--steps", 1]
    out = run("finetune.py", *options, "--output", tmp_path / "run")
    assert "pattern exact (replaces the pattern that the model was saved with), model " in out.splitlines()[0]
    assert AutoConfig.from_pretrained(tmp_path / "run").ring_dilated["pattern"] == "exact"
    for pattern, other in (("window:8", True), ("window:32+2", False)):
        assert common.check_heads(str(tmp_path / "model"), ra.Pattern.parse(pattern)) is other


def errors_of(rank, calls):
    """The errors that calls of recipes end with, each (module, arguments), on this rank."""
    errors = []
    for recipe, arguments in calls:
        process_environment(rank, 2)
        sys.argv = [f"{recipe}.py", *map(str, arguments)]
        with pytest.raises((SystemExit, ValueError)) as error:
            importlib.import_module(recipe).main()
        errors.append(str(error.value))
    return errors


def test_two_processes_refuse_what_they_cannot_do(folder, tmp_path):
    """Both of them, and nothing is written. More of a Trainer's are in tests/training/test_set_up.py."""
    words = ["--model", folder / "model", "--output", tmp_path / "run"]
    of_trainer = [*words[:2], "--output_dir", words[3], "--use_cpu", "true", "--text", folder / "text.txt"]
    missing = "the size of rings was not given: --ranks 2 is one ring, --ranks 1 gives each process rows of its"
    calls = {missing: [], "they cannot form rings of 3: --ranks 2 is one ring": ["--ranks", 3]}
    calls |= {"heads=2 needs transport='heads', got 'auto'": ["--ranks", 2, "--ring-heads", 2]}
    arguments = [("finetune", [*words, *more]) for more in calls.values()]
    for errors in run_ranks(errors_of, 2, [*arguments, ("finetune_trainer", of_trainer)]):
        assert all(told in error for told, error in zip([*calls, missing], errors, strict=True)), errors
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_process_alone_refuses_a_ring_of_two(folder, tmp_path, monkeypatch):
    """Before the model is loaded."""
    monkeypatch.setattr(common, "load_model", None)
    words = ["--model", folder / "model", "--text", folder / "text.txt", "--ranks", 2]
    for recipe, output in (("finetune.py", "--output"), ("finetune_trainer.py", "--output_dir")):
        error = refused(recipe, *words, output, tmp_path / "run")
        assert "one process cannot form a ring of --ranks 2: start 2 processes with torchrun, on a CPU" in error
        assert "Traceback" not in error


@pytest.mark.drawn(2)
@pytest.mark.parametrize("plugin", ["fsdp2", "zero3"])
def test_finetune_with_sharded_parameters(plugin, folder, bounds, tmp_path):
    if plugin == "zero3":
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    by_heads = ["--transport", "heads", "--ring-heads", 2]
    options = ["--ranks", 2, *by_heads, "--checkpointing", "--offload"]
    figures, _ = finetune(folder, tmp_path, *options, plugin=plugin)
    assert figures["transport"] == "heads"
    assert_same_steps(tmp_path, folder, bounds)


@pytest.fixture(scope="module")
def by_the_trainer(folder, nudged):
    """A run on one process, and the bounds for others."""
    run = train(folder, folder / "trainer", 1)
    return run, bounds_of(train(nudged, nudged / "trainer", 1), run)


def train(folder, output, ring_size, *options, plugin=None, processes=1):
    """What two runs by the Trainer are compared by."""
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--pattern", "pyramid:32,3,2", *options]
    options += "--tokens 250 --max_steps 3 --held_out 500 --learning_rate 1e-2 --disable_tqdm true".split()
    options += ["--ranks", ring_size, "--output_dir", output, "--save_strategy", "steps", "--save_steps", 2]
    out = run("finetune_trainer.py", *options, plugin=plugin, processes=processes)
    assert f"rank {ring_size - 1}: peak memory" in out and "eval_loss" in out
    transport = "heads" if "heads" in options else "auto"
    of = "1 process" if ring_size == 1 else f"{ring_size} processes"
    first = f"1 ring of {of}, layout auto, transport {transport}, kernel auto, pattern pyramid:32,3,2, model "
    assert out.startswith(first) and "% full" in out.splitlines()[0] and out.count("1 ring of") == 1
    assert LlamaForCausalLM.from_pretrained(output).config.ring_dilated["pattern"] == "pyramid:32,3,2"
    state = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    return {
        "losses": [step["loss"] for step in steps],
        "norms": [step["grad_norm"] for step in steps],
        "parameters": AutoModelForCausalLM.from_pretrained(output).state_dict(),
    }


def test_the_trainer_goes_on_from_the_last_whole_checkpoint(folder, by_the_trainer, tmp_path):
    """Killed before any of its files was whole, a checkpoint is left alone, and the one before is taken."""
    output = tmp_path / "run"
    shutil.copytree(folder / "trainer", output)
    last = output / "checkpoint-3"
    files = sorted((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    assert files[-1].name == "trainer_state.json"
    assert checkpoints.last_saved(output, 1) == last
    for file in reversed(files):  # in the order of writing, backwards
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        assert checkpoints.last_saved(output, 1) == output / "checkpoint-2", file
        file.unlink()
        assert checkpoints.last_saved(output, 1) == output / "checkpoint-2", file
    with pytest.raises(SystemExit, match=r"no whole checkpoint of 2 processes .*; checkpoint-2 lacks rng_state_0\.pth"):
        checkpoints.last_saved(output, 2)
    run, bounds = by_the_trainer
    assert_equal_runs(train(folder, output, 1, "--resume_from_checkpoint", "true"), run, "resumed", bounds)
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--output_dir", output]
    assert "has checkpoint-3 of an earlier run" in refused("finetune_trainer.py", *options)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("plugin", [None, "fsdp2", "zero3"])
def test_finetune_by_the_trainer(plugin, folder, by_the_trainer, tmp_path):
    if plugin == "zero3":
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    run, bounds = by_the_trainer
    by_heads = ["--transport", "heads", "--ring_heads", 2] if plugin else []
    found = train(folder, tmp_path, 2, *by_heads, plugin=plugin, processes=2)
    assert_equal_runs(found, run, plugin, bounds)


def test_finetune_by_the_trainer_on_a_stream_of_uneven_files(folder, tmp_path):
    """Two rings of two read 12 rows an epoch, and end together."""
    for number, count in enumerate((4, 5, 3)):
        text = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 5}) + "\n"
        (tmp_path / f"{number}.jsonl").write_text(text * count)
    options = ["--model", folder / "model", "--dataset", tmp_path, "--streaming", "true", "--tokens", 256]
    options += ["--output_dir", tmp_path / "run"]
    options += "--ranks 2 --max_steps 4 --gradient_accumulation_steps 2 --disable_tqdm true".split()
    out = run("finetune_trainer.py", *options, processes=4)
    assert out.startswith("2 rings of 2 processes") and out.count("'loss'") == 4
    assert LlamaForCausalLM.from_pretrained(tmp_path / "run")


CALIBRATED, OTHER = "pyramid:32,3,2", "window:16+2"


@pytest.fixture(scope="module")
def calibrations(folder):
    """The files of two calibrations of the model."""
    ids = torch.arange(3, 131)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="ring_dilated")
    for name, menu in {"one": (CALIBRATED, OTHER), "other": (OTHER, "window:8+2")}.items():
        chosen = ra.calibrate(model, [ids], 0.9, menu, refinements=0, progress=False)
        chosen.save(folder / f"{name}.json")
        assert {str(one) for heads in chosen.of_heads().values() for one in heads} == {menu[0]}
    return folder / "one.json", folder / "other.json"


def test_perplexity_under_a_calibration_is_that_of_its_patterns(folder, calibrations, tmp_path):
    options, (one_file, other_file) = ["--model", folder / "model", "--text", folder / "text.txt"], calibrations
    # What follows a calibration must not keep its layers.
    patterns = ["--tokens", 600, "--pattern", one_file, OTHER, CALIBRATED, other_file]
    run("perplexity.py", *options, *patterns, "--json", tmp_path / "figures.json")
    one, other, uniform, uniform_other = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert one["nll"] == uniform["nll"] != other["nll"] == uniform_other["nll"]
    assert one["flop_share"] == pytest.approx(uniform["flop_share"], rel=0.02)


def test_fine_tuning_keeps_the_calibrated_patterns(folder, calibrations, tmp_path):
    options = ["--model", folder / "model", "--text", folder / "text.txt", "--tokens", 250, "--output", tmp_path]
    options += ["--steps", 1, "--save-every", 1]
    run("finetune.py", *options, "--pattern", calibrations[0])
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config
    chosen = ra.Calibration.load(calibrations[0])
    assert config.ring_dilated["layers"] == chosen.texts_of_layers
    done = launch("finetune.py", *options, "--resume", "--pattern", calibrations[1])
    assert done.returncode and "settings (pattern {" in done.stderr
