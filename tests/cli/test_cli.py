"""The command line: its imports, its output, and that an error of the library ends it with one line."""

import gc
import importlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hf_ring_attention as ra
from hf_ring_attention import __version__
from hf_ring_attention.cli.main import COMMANDS
from hf_ring_attention.cli.output import layer_numbers, print_table, short_count, short_number, short_seconds
from hf_ring_attention.cost.explain import explain, time_of_layer
from hf_ring_attention.cost.layers import explain_layers
from hf_ring_attention.cost.models import attention_of_model, load_config
from hf_ring_attention.cost.questions import most_cached_tokens
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.plan.traffic import short_bytes
from tests.support.measured_once import measured_once
from tests.support.patches import replaced
from tests.support.tiny_models import tiny_config

CALL = "--tokens 8k --ranks 4 --heads 8 --kv-heads 2 --head-dim 32"


@pytest.fixture
def gemma(tmp_path):
    """The folder of a config with layers of two kinds."""
    config = {"model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config |= {"num_hidden_layers": 8, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_nothing_heavy_is_loaded_for_help_version_explain_and_models():
    script = """
import sys
from pathlib import Path
from hf_ring_attention.cli.main import main

assert "rich" not in sys.modules, "without rich, the command line names the package to install"
call = "--tokens 8k --ranks 4 --heads 8 --head-dim 32"
for words in ("--version", "--help", "explain --help", "check --help", "perplexity --help", "models llama",
              "plot ring --help", "plot pattern exact", f"explain {call}", f"plot ring {call} --tflops 1 --gbps 1"):
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code, words
    loaded = {"torch", "transformers"} & {*sys.modules}
    assert not loaded, (words, loaded)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


@pytest.mark.parametrize("name", ["", "plot", *COMMANDS])
def test_help_is_one_screen_of_80_columns_with_examples(name, command):
    text = command(f"{name} --help")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 52
    assert not name or f"  hf-ring-attention {name}" in text.partition("Examples:")[2]


@pytest.mark.parametrize("options", ["", " --transport heads --ring-heads 2"])
def test_explain_prints_what_the_library_finds(options, command):
    printed = command(f"explain {CALL} --pattern window:512+4{options}")
    settings = {"transport": "heads", "heads": 2} if options else {}
    call = {"seq_len": 8192, "ring_size": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    expected = explain("window:512+4", **call, **settings)
    assert f"{expected.layout.kind}: {expected.layout_decision.reason}"[:60] in printed
    most = max(share.forward_flops for share in expected.ranks) / 1e12
    share = Pattern.parse("window:512+4").flop_share(8192, num_heads=8, num_kv_heads=2)
    row = rf"window:512\+4 +1 +{most:.4g} +{expected.imbalance:.3f} +{share:.2%}$"
    assert re.search(row, printed, re.MULTILINE)
    for name, mark in (("ring", ""), (expected.decision.choice, r" \*")):
        sizes = expected.busiest(name)
        figures = map(short_bytes, (sizes.forward.received, sizes.backward.received, sizes.buffers))
        assert re.search(rf" {name}{mark} +{' +'.join(figures)} ", printed), name
    found = json.loads(command(f"explain {CALL} --pattern window:512+4 --gbps 10{options} --json"))
    (of_layer,) = found["patterns"]
    assert (found["layout"], of_layer["transport"]) == (expected.layout.kind, expected.decision.choice)
    for name, (seconds,) in of_layer["seconds"].items():
        assert of_layer["bytes"][name]["buffers"] == expected.busiest(name).buffers
        assert seconds == time_of_layer(expected, name, flops=4e14, bandwidth=1.25e9)._asdict()


def test_explain_adds_up_layers_of_two_kinds(gemma, command):
    call = {"seq_len": 16384, "ring_size": 4}
    attention = attention_of_model(load_config(gemma), gemma)
    step = explain_layers(attention, **call)
    calls = {str(call.pattern): (layers, call) for layers, call in step.calls}
    assert {text: layers for text, (layers, _) in calls.items()} == {"window:512": [0, 1, 2, 3, 4, 6, 7], "exact": [5]}
    ranks = zip(calls["window:512"][1].ranks, calls["exact"][1].ranks)
    assert step.flops == max(7 * window.forward_flops + full.forward_flops for window, full in ranks)
    assert step.flop_share == pytest.approx(attention.flop_share(16384))
    # All layers of a model are divided alike, as the pattern without a window asks for.
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    alike = explain("window:512", **call, **heads, layout="zigzag")
    assert (step.base.layout.kind, calls["window:512"][1].ranks) == ("zigzag", alike.ranks)
    assert step.traffic.buffers == max(call.busiest().buffers for _, call in calls.values())
    printed = command(f"explain --tokens 16k --ranks 4 --model {gemma}")
    assert re.search(r"^layers +0-4, 6-7: window:512 *$", printed, re.MULTILINE)
    assert re.search(rf"^a step +8 +{step.flops / 1e12:.4g} ", printed, re.MULTILINE)
    assert re.search(r"^transport +exact: ring: the busiest of 4 ranks needs", printed, re.MULTILINE)


HYBRID = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
HYBRID |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
#: A delta rule of Qwen3-Next: 4 heads of 32 x 64, of which two share keys.
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
DELTA |= {"linear_conv_kernel_dim": 4}


def test_explain_counts_the_bytes_of_mixers_apart_from_attention(tmp_path, command):
    # Two rows of a zigzag have two runs each on a rank: the last 3 inputs of 2 x 2 x 32 + 4 x 64 channels, and 4 x 32 x
    # (64 + 32) numbers in float32, which each rank sends to 3 others. MiniMax gathers rows of 512 numbers instead.
    states, rows = 3 * 4 * (384 * 3 * 2 + 4 * 32 * 96 * 4), 3 * 2 * 2048 * 512 * 2
    for config, sent, words in (
        ({**DELTA, "model_type": "qwen3_next"}, states, "their states pass from rank to rank"),
        ({"model_type": "minimax"}, rows, "up to 4 times the work of one device in all"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**HYBRID, **config}))
        attention = attention_of_model(load_config(str(tmp_path)), "x")
        step = explain_layers(attention, seq_len=8192, ring_size=4, batch_size=2)
        ((_, mixers),) = step.mixers
        assert mixers.forward == mixers.backward == (sent, sent)
        ((layers, call),) = step.calls
        assert layers == [3] and step.traffic.backward.sent == call.busiest().backward.sent + 3 * sent
        printed = " ".join(command(f"explain --tokens 8192 --ranks 4 --model {tmp_path} --batch-size 2").split())
        assert words in printed and f"{short_bytes(sent)} " in printed and "mixers in layers 0-2; " in printed


@measured_once
def test_commands_print_the_bytes_of_the_cache(tmp_path, command):
    config = tiny_config("llama", num_hidden_layers=3)
    ra.patch_config(config, ["window:32+4", "exact", "exact"]).save_pretrained(tmp_path)
    answer = ra.estimate(config, 65536, memory=10**9)
    words = f"estimate --model {tmp_path} --tokens 64k --memory 1GB"
    printed, figures = command(words), json.loads(command(f"{words} --json"))["cache"]
    kept, whole = short_bytes(answer.cache.kept), short_bytes(answer.cache.whole)
    assert re.search(rf"^all +3 +{kept} +{whole} *$", printed, re.MULTILINE)
    most = most_cached_tokens(answer)
    assert f"tokens that fit beside the weights: {most['kept']:,} by pattern, {most['whole']:,} whole" in printed
    assert (figures["kept"], figures["whole"], figures["most_tokens"]) == (answer.cache.kept, answer.cache.whole, most)
    assert figures["patterns"]["exact"]["layers"] == [1, 2]
    alone = " ".join(command(f"{words} --pattern window:32+4").split())
    assert f"tokens that fit beside the weights: any number by pattern, {most['whole']:,} whole" in alone
    explained = " ".join(command(f"explain --model {tmp_path} --tokens 64k --ranks 2").split())
    assert f"{kept} by ra.PatternCache, {whole} whole, on one device" in explained
    packed = command(f"explain --model {tmp_path} --tokens 64k --ranks 2 --documents 100,200")
    assert "PatternCache" not in packed


@measured_once
def test_many_patterns_are_printed_as_their_sums(tmp_path, command):
    config = tiny_config("llama", num_hidden_layers=6)
    patterns = [f"window:{length}+4" for length in (16, 32, 64, 128, 256)]
    ra.patch_config(config, [*patterns, "exact"]).save_pretrained(tmp_path)
    words = f"--tokens 1M --ranks 4 --model {tmp_path}"
    found, printed = json.loads(command(f"explain {words} --json")), command(f"explain {words}")
    assert "window:64+4" not in printed and "6 with 6 patterns" in printed
    assert re.search(r"^transport +collective in layers 0-4 *$", printed, re.MULTILINE)
    assert re.search(r"^transport +ring in layers 5 *$", printed, re.MULTILINE)
    chosen = [of["seconds"][of["transport"]][-1] for of in found["patterns"]]
    total = sum(time["computing"] + time["moving"] - time["hidden"] for time in chosen)
    assert re.search(rf"^a step +as chosen \*.* {re.escape(short_number(1e3 * total))} +\d+% *$", printed, re.MULTILINE)
    estimated = command(f"estimate {words}")
    assert "window:64+4" not in estimated and re.search(r"^all +6 ", estimated, re.MULTILINE)
    assert re.search(r"^the largest of 6 +collective, ring +collective ", estimated, re.MULTILINE)


def test_models_say_what_works_and_why_not(command, ended):
    """A type that is not listed is named after the others were answered."""
    printed = command("models")
    assert re.search(r"^llama +supported +yes +yes", printed, re.MULTILINE)
    assert re.search(r"^xlnet +refused +no +no +XLNetLMHeadModel", printed, re.MULTILINE)
    assert [x["status"] for x in json.loads(command("models llama xlnet --json"))] == ["supported", "refused"]
    for name, message in (
        ("modernbert", "predict the next token, and 'modernbert' is of another kind: ra.patch_model(model) accepts"),
        ("lama", "'lama' is not a model type of Transformers"),
    ):
        status, printed, error = ended(f"models gpt2 {name}")
        assert status == 2 and message in error
        assert re.search(r"^gpt2 +supported", printed, re.MULTILINE)
    assert "did you mean llama" in error
    assert all(f"'{name}' is not a model type" in ended("models lama foo")[2] for name in ("lama", "foo"))
    assert "it has no attention to shard: leave this package out" in " ".join(command("models mamba").split())


@pytest.mark.parametrize("words", [["models"], ["--help"]])
def test_a_reader_that_ends_leaves_no_traceback(words):
    """As `head` does; what was printed fits into a buffer, or not."""
    program = [sys.executable, "-c", "from hf_ring_attention.cli.main import main; main()", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        done.stdout.close()
        assert done.stderr.read() == ""
    assert done.returncode == int("--help" not in words)


def test_a_refused_estimate_leaves_the_garbage_collector_on(gemma, refusal):
    error = refusal(f"estimate --model {gemma} --tokens 1k --devices 8 --ranks 3")
    assert "ring_size" in error and gc.isenabled()


@measured_once
def test_tables_fit_80_columns(gemma, command):
    for words in (
        f"explain --tokens 128k --ranks 8 --model {gemma} --pattern pyramid:512,3",
        f"estimate --tokens 128k --devices 8 --memory 80GB --model {gemma}",
        "models",
    ):
        assert max(map(len, command(words).splitlines())) <= 80, words


def test_a_model_is_known_by_its_short_name(tmp_path, gemma, refusal, command, monkeypatch):
    """Where its package is installed; the recipes make a folder of it."""
    common, obstacle = importlib.import_module("common"), ["it is not installed"]
    replaced(monkeypatch, common, obstacle=lambda: obstacle[0], installed_model=lambda: gemma)
    words = "estimate --tokens 1k --model smollm2-135m"
    for wrong in (words, f"perplexity smollm2-135m {gemma}/config.json", "check --model smollm2-135m"):
        assert "argument --model: it is not installed" in refusal(wrong)
    obstacle[0] = None
    assert command(words) == command(f"estimate --tokens 1k --model {gemma}")
    (tmp_path / "calibrated").mkdir()
    (tmp_path / "calibrated" / "config.json").write_text((Path(gemma) / "config.json").read_text())
    (tmp_path / "calibrated" / "calibration.json").touch()
    error = refusal(f"perplexity --model {tmp_path}/calibrated --text {gemma}/config.json")
    assert f"calibrated has no weights: --model MODEL --pattern {tmp_path}/calibrated/calibration.json" in error


def test_a_hub_that_is_not_reached_is_told_at_once(refusal, monkeypatch):
    """Its library would sleep, and try again."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # Nobody listens there.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", None)
    words = "explain --tokens 1k --ranks 2 --pattern exact --model"
    reason = "the hub was not reached, nor is the model in its cache: connect, or name a folder"
    assert reason in refusal(f"{words} nobody/nothing")
    assert "argument --model: there is no folder './nothing' (from " in refusal(f"{words} ./nothing")


def test_an_estimate_ends_with_a_command_that_the_recipe_takes(gemma, command):
    finetune = importlib.import_module("finetune")
    words = "--tokens 16k --ranks 4 --batch-size 2 --pattern window:1k+4 --layer-tokens-at-once 4k --offload"
    printed = command(f"estimate --model {gemma} --parallel zero3 {words}").partition("To train:\n")[2]
    launched, _, options = " ".join(printed.replace("\\\n", " ").split()).partition(" recipes/finetune.py ")
    assert launched == "accelerate launch --config_file recipes/accelerate/zero3.yaml --num_processes 4"
    args = finetune.parse_args(options.split())
    assert (args.tokens, args.ranks, args.batch_size, args.layer_tokens_at_once) == (16384, 4, 2, 4096)
    assert (args.pattern, args.checkpointing, args.offload, args.dtype) == ("window:1k+4", True, True, None)
    assert "--dtype no" in command(f"estimate --model {gemma} --tokens 1k --dtype float32")
    for other in ("--parallel zero2", "--offload-optimizer", "--no-keep-attention", "--master-dtype bfloat16"):
        assert "To train:" not in command(f"estimate --model {gemma} --tokens 1k {other}"), other


def test_tables_show_every_character_of_every_cell(capsys):
    """Random tables of 1 to 9 columns, with cells of 0 to 60 characters."""
    choose = random.Random(0)
    for _ in range(200):
        texts = ["".join(choose.choices("abcdefgh ", k=choose.choice((4, 8, 15, 60)))) for _ in range(18)]
        count = choose.randint(1, 9)
        table = [texts[:count], texts[count : 2 * count]]
        print_table("", table[0], table[1:], left=choose.randint(0, count))
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        letters = Counter("".join(texts[: 2 * count]).replace(" ", ""))
        assert Counter(re.sub(r"[\s─]|\[\d\]", "", printed)) == letters, table


def test_long_words_are_notes_and_no_word_of_a_table_is_broken(capsys):
    """Unless the terminal is wide enough."""
    rows = [[f"text{number}.txt", "calibrated/calibration.json", *["123.456"] * 6] for number in range(2)]
    print_table("", ["text", "pattern", *["a number of it"] * 6], rows, left=2)
    printed = capsys.readouterr().out
    assert printed.count("[1]") == 3 and "[1] calibrated/calibration.json\n" in printed and "[2]" not in printed
    print_table("", ["text", "pattern"], [row[:2] for row in rows], left=2)
    assert capsys.readouterr().out.count("calibrated/calibration.json") == 2


def test_numbers_are_short():
    assert [short_count(n) for n in (131072, 1 << 20, 1000, 3 << 19)] == ["128k", "1M", "1000", "1536k"]
    sizes = ["12 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "1.0 TiB"]
    assert [short_number(x) for x in (0.01234, 12.34, 1278.4, 36030.0)] == ["0.0123", "12.3", "1,278", "36,030"]
    assert [short_bytes(n) for n in (12, 1536, 5 << 20, 3 << 30, 1 << 40)] == sizes
    assert [short_seconds(n) for n in (2.5, 0.0125, 3e-6, 4e-9)] == ["2.5 s", "12.5 ms", "3 µs", "4 ns"]
    assert layer_numbers([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
