"""The shell blocks of the pages run in their order, on a tiny model with short rows, but for what has tests of its own.

Those are the tutorial, the quick start, programs of recipes/bench, `make` and `pip`; lm-evaluation-harness is not installed.
"""

import itertools
import math
import re
import shlex

import pytest
from transformers import AutoConfig

import hf_ring_attention as ra
from tests.support.checkpoints import save_tiny_checkpoint
from tests.support.reader import Reader
from tests.test_readme import ACCELERATE, PAGES, PREAMBLE, ROOT, as_tested, blocks

LEFT_OUT = re.compile(r"make |pip |.*\bquick_start.py|.*\brecipes/bench/|.*\blm-eval\b|python recipes/pictures.py")
#: What stands in a command for what its reader has.
NAMES = dict.fromkeys(("ID", "./folder", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"), "model")
#: Its texts; FILE is the first one.
TEXTS = "book manual others other topics hamlet genesis".split()
#: Options that count tokens of rows that a model reads, and steps.
TOKENS, STEPS = {"--tokens", "--text-tokens", "--stride", "--held-out"}, {"--steps", "--save-every", "--eval-every"}
READ_NOTHING = ("explain", "estimate", "plot", "check")


def fewer(number):
    """Far fewer tokens, in the same order: 1k become 512, and 128k 5792."""
    scale = {"k": 2**10, "M": 2**20}.get(number[-1], 1)
    return str(math.isqrt(256 * scale * int(number.rstrip("kM"))))


def as_run(command):
    """A command with a tiny model, few steps, short rows and rings of two."""
    words = [NAMES.get(word, word).replace("FILE", "book.txt") for word in shlex.split(command, comments=True)]
    reads = not any(word in READ_NOTHING for word in words)
    for number, (option, value) in enumerate(itertools.pairwise(words), start=1):
        if option in TOKENS and reads:
            words[number] = ",".join(map(fewer, value.split(",")))
        elif option in STEPS or (option == "--ranks" and reads):
            words[number] = "2"
        elif option == "--plot":
            words[number] = value.rpartition("/")[2]
    trains = any("finetune.py" in word for word in words)
    if (
        any(re.match("recipes/(perplexity|retrieval|ask|finetune).py", word) for word in words)
        and "--model" not in words
    ):
        words += ["--model", "model"]
    return shlex.join(words + ["--steps", "2"] * (trains and "--steps" not in words))


def commands(page):
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not LEFT_OUT.match(line)]


WITH_COMMANDS = [page for page in PAGES if page.stem != "tutorial" and commands(page)]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run(page, tmp_path):
    reader = Reader(tmp_path)
    save_tiny_checkpoint(tmp_path / "model", "<end>", max_position_embeddings=16384)
    ra.patch_config(AutoConfig.from_pretrained(tmp_path / "model"), "window:512+4").save_pretrained(tmp_path / "model")
    for number, name in enumerate(TEXTS):
        (tmp_path / f"{name}.txt").write_text(f"Chapter {number}. " + "The quick brown fox jumps. " * 1000)
    (tmp_path / "train.py").write_text(as_tested(PREAMBLE + ACCELERATE, "model"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "fox.txt").write_text("The quick brown fox jumps. " * 200)
    for command in commands(page):
        if "calibrated/" in command and not (tmp_path / "calibrated").exists():
            reader.run("hf-ring-attention calibrate --model model --text book.txt --tokens 512 --output calibrated")
        reader.run(as_run(command))


def test_commands_are_shortened_and_few_are_left_out():
    shown = (
        "torchrun --nproc-per-node 8 recipes/finetune.py --model ID --text FILE --ranks 8 --tokens 128k --plot a/b.png"
    )
    short = "torchrun --nproc-per-node 8 recipes/finetune.py --model model --text book.txt --ranks 2 --tokens 5792"
    assert as_run(shown) == f"{short} --plot b.png --steps 2"
    counting = "hf-ring-attention explain --tokens 128k --ranks 8 --model model"
    assert as_run(counting) == counting
    assert sum(len(commands(page)) for page in WITH_COMMANDS) > 40
