"""The commands of guide/tutorial.md run in its order, on a tiny model, and print what the page shows; LoRA folders are models.

The page has figures of a real model, so numbers, names of models and answers are not compared.
"""

import contextlib
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ring_attention as ra
from hf_ring_attention.cli.loading import load_model
from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.programs import run_program
from tests.support.reader import COMMAND_LINE, TIMEOUT, Reader
from tests.support.recipe_runs import ENVIRONMENT, RECIPES, refused, run

PAGE = RECIPES / "guide" / "tutorial.md"
ROOT = RECIPES.parent
#: Beside the fifth step, Ctrl-C reaches each process.
STOPPED = """
import os, signal, finetune
calls, loss = iter(range(1, 100)), finetune.batch_loss
def stopped(*args, **options):
    if next(calls) == 5:
        os.kill(os.getpid(), signal.SIGINT)
    return loss(*args, **options)
finetune.batch_loss = stopped
finetune.main()
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
#: Lines of the page that a model writes.
ANSWER = re.compile("Its title is")


def blocks():
    """The language and the content of each fenced block of the page, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def save_model(folder):
    """A tiny model of bytes that knows chats."""
    save_tiny_checkpoint(folder, "<end>", max_position_embeddings=8192)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Student(Reader):
    """Follows the tutorial with a tiny model; `printed` has what each block printed."""

    def __init__(self, folder):
        super().__init__(folder)
        self.printed = {}
        save_model(folder / "model")
        (folder / "stopped.py").write_text(STOPPED)


def plain(text):
    """A line without its numbers, the width of its columns, and the names of models."""
    text = re.sub(r"HuggingFaceTB/\S+?(?=[:,\s])|\bmodel(?=, float32)", "MODEL", text)
    return " ".join(re.sub(r"[-+]?\d[\d.,]*(e-\d+)?", "#", text).split())


def assert_printed(shown, printed):
    """Each line of the page, or its parts around "...", stands in a line that was printed."""
    lines = [plain(line) for line in re.split(r"[\n\r]", printed)]
    for line in filter(None, map(str.strip, shown.splitlines())):
        parts = [plain(part) for part in line.split("...") if part.strip()]
        if not ANSWER.match(line):
            assert any(all(part in other for part in parts) for other in lines), (line, printed[-6000:])


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Has followed the page; `printed` has the output of each command."""
    reader, programs = Student(tmp_path_factory.mktemp("tutorial")), []
    for language, body in blocks():
        if language == "python":  # Its first line names the file.
            (reader.folder / re.match(r"# (\w+\.py)\n", body)[1]).write_text(body)
            programs.append(body)
        elif language == "bash":
            commands = [line for line in body.replace("\\\n", " ").splitlines() if line.strip()]
            reader.printed[body] = ""
            for command in commands:
                stops = "finetune.py" in command and "--resume" not in command
                how = {"status": 130, "instead": "stopped.py"} if stops else {}
                reader.printed[body] += reader.run(command.replace("$MODEL", "model"), **how)
    assert all(len(program.splitlines()) <= 13 for program in programs)
    return reader


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(reader):
    last, compared = "", 0
    for language, body in blocks():
        if language == "bash":
            last = body
        elif language == "text":
            assert_printed(body, reader.printed[last])
            compared += 1
    assert compared >= 7


@pytest.mark.parametrize(("shown", "fits"), [("loss 3.1 -> 0.4, ... full", True), ("loss 3.1 -> 0.4, rose", False)])
def test_only_numbers_and_omitted_parts_may_differ(shown, fits):
    with contextlib.nullcontext() if fits else pytest.raises(AssertionError):
        assert_printed(shown, "saved\nloss 5 -> -0.44,  rows 77.3% full\n")


@pytest.mark.slow
def test_a_run_that_was_stopped_went_on(reader):
    [body] = [body for body in reader.printed if "--resume" in body]
    assert re.search(r"going on after step 5, from runs/\S+/checkpoint-5", reader.printed[body])


# ---- LoRA folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that was saved with a window, and adapters (DoRA) that were trained under a smaller one, without a tokenizer."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ra.patch_model(model, "window:32").save_pretrained(folder / "model")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False, use_dora=True
    )
    model = ra.patch_model(peft.get_peft_model(model, config), "window:8+2")
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.mul_(1 + torch.rand_like(x) if "magnitude" in name else 1)
    model.save_pretrained(folder / "lora")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    ids = torch.arange(3, 60)[None]
    torch.save(model.eval()(ids).logits, folder / "logits.pt")
    return folder


def perplexities(folder, name, *patterns):
    program = folder / "command_line.py"
    program.write_text(COMMAND_LINE)
    words = ["perplexity", name, "text.txt", "--tokens", 200, "--json"]
    words += [word for pattern in patterns for word in ("--pattern", pattern)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = run_program(program, *words, environment=environment, timeout=TIMEOUT, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return [row["perplexity"] for row in json.loads(done.stdout)["rows"]]


def test_commands_measure_a_folder_of_adapters_and_its_pattern(folder):
    exact, own, window = perplexities(folder, "lora", "exact", "own", "window:8+2")
    assert own == window != exact
    assert own != perplexities(folder, "lora", "window:32")[0]
    assert exact != perplexities(folder, "model", "exact")[0]
    model = ra.patch_model(load_model(str(folder / "lora"), "float32", "cpu", trust=False))
    assert torch.allclose(
        model(torch.arange(3, 60)[None]).logits, torch.load(folder / "logits.pt", weights_only=True), atol=1e-5
    )


def test_adapters_that_lack_weights_are_refused(folder, tmp_path):
    shutil.copytree(folder / "lora", tmp_path / "lora")
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    weights = load_file(file)
    removed = next(name for name in weights if "magnitude" in name)
    save_file({name: x for name, x in weights.items() if name != removed}, file)
    with pytest.raises(ValueError, match=r"lacks 1 weights of its adapters, such as .*magnitude"):
        load_model(str(tmp_path / "lora"), "float32", "cpu", trust=False)


def test_a_merged_model_computes_what_its_adapters_computed(folder, tmp_path):
    printed = run("merge.py", "--model", folder / "lora", "--output", tmp_path / "merged")
    assert f"saved to {tmp_path / 'merged'} in float32, with the pattern of the adapters" in printed
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.ring_dilated["pattern"] == "window:8+2"
    logits = torch.load(folder / "logits.pt", weights_only=True)
    assert torch.allclose(merged(torch.arange(3, 60)[None]).logits, logits, atol=1e-5)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="sdpa")
    assert not torch.allclose(stock(torch.arange(3, 60)[None]).logits, logits, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE
    run("merge.py", "--model", folder / "lora", "--output", tmp_path / "small", "--dtype", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").dtype == torch.bfloat16


def test_recipes_read_adapters_as_their_merged_model(folder, tmp_path):
    run("merge.py", "--model", folder / "lora", "--output", tmp_path / "merged")
    found = []
    for model in (folder / "lora", tmp_path / "merged"):
        words = ["--model", model, "--text", folder / "text.txt"]
        run("ask.py", *words, "--question", "Who?", "--answer-tokens", 9, "--json", tmp_path / "asked.json")
        found.append([json.loads((tmp_path / "asked.json").read_text())["answers"][0]["tokens"]])
        options = ["--tasks", "passkey", "--tokens", 500, "--depths", 0.5, "--pattern", "exact", "--json"]
        run("retrieval.py", *words, *options, tmp_path / "found.json")
        found[-1].append(json.loads((tmp_path / "found.json").read_text())["rows"][0]["losses"])
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    printed = run("perplexity.py", "--model", folder / "lora", "--text", folder / "text.txt", "--tokens", 100)
    assert "window:512+4" in printed


def test_adapters_are_merged_before_they_are_trained_and_other_models_are_not(folder, tmp_path):
    words = ["--model", folder / "lora", "--text", folder / "text.txt"]
    assert "has adapters: merge them with recipes/merge.py" in refused("finetune.py", *words)
    assert "has adapters: merge them with recipes/merge.py" in refused("finetune_trainer.py", *words)
    wrong = refused("merge.py", "--model", folder / "model", "--output", tmp_path / "merged")
    assert "the folder of adapters was expected" in wrong
    (tmp_path / "file").write_text("")
    assert "has files: name a new one" in refused("merge.py", "--model", folder / "lora", "--output", tmp_path)


def test_without_peft_adapters_are_refused_with_the_remedy(folder, monkeypatch):
    monkeypatch.setattr("arguments.importlib.util.find_spec", lambda name: None)
    assert "has adapters: it needs peft" in refused("ask.py", "--model", folder / "lora")


def test_the_config_of_adapters_has_their_pattern(folder):
    adapted, whole = (ra.estimate(str(folder / name), 1000).cache.kept for name in ("lora", "model"))
    assert adapted < whole / 2
