"""The command line: what it loads, what it prints, and that what the library refuses ends it with one line."""

import json
import re
import subprocess
import sys

import pytest

from hf_ring_attention import __version__
from hf_ring_attention.cli.main import COMMANDS, main
from hf_ring_attention.cli.output import layer_numbers, short_bytes, short_count, short_seconds
from hf_ring_attention.cost.explain import explain
from hf_ring_attention.plan.patterns import Pattern

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
from hf_ring_attention.cli.main import main

assert "rich" not in sys.modules, "without it, the command line says what to install"
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


@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("exact", {}),
        ("window:512+4", {}),
        ("pyramid:64,3", {}),
        ("exact", {"transport": "heads"}),
        ("exact", {"transport": "heads", "heads": 2}),
    ],
)
def test_explain_says_in_json_what_the_library_says(pattern, settings, command):
    options = "".join(f" --{name.replace('heads', 'ring-heads')} {value}" for name, value in settings.items())
    words = f"explain {CALL} --pattern {pattern} --layers 3{options}"
    answer = json.loads(command(f"{words} --json"))
    call = {"seq_len": 8192, "world_size": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    expected = explain(pattern, **call, **settings)
    (kind,), step = answer["layer_kinds"], answer["step"]
    assert (answer["tokens"], answer["ranks"], answer["layout"]) == (8192, 4, expected.layout.kind)
    assert (kind["pattern"], kind["layers"], kind["transport"]) == (pattern, [0, 1, 2], expected.decision.choice)
    forward = max(share.forward_flops for share in expected.ranks)
    assert (kind["forward_flops"], kind["backward_flops"]) == (forward, 2.5 * forward)
    assert (step["forward_flops"], step["backward_flops"]) == (3 * forward, 3 * 2.5 * forward)
    share = Pattern.parse(pattern).flop_share(8192, num_heads=8, num_kv_heads=2)
    assert step["share_of_exact_flops"] == pytest.approx(share, rel=1e-12)
    for name in ("ring", "collective", "heads"):
        traffic = [getattr(rank, name) for rank in expected.ranks]
        assert kind[f"{name}_bytes"]["forward_received"] == max(size.forward.received for size in traffic)
        assert kind[f"{name}_bytes"]["buffers"] == max(size.buffers for size in traffic)
    of_layer = kind[f"{expected.decision.choice}_bytes"]
    assert step["bytes"]["forward_received"] == 3 * of_layer["forward_received"]
    assert step["bytes"]["buffers"] == of_layer["buffers"]
    groups = "exchanged by 2 neighbours each; rings between groups: 2 ranks"
    assert "heads" not in settings or groups in command(words)


def test_explain_adds_up_layers_of_two_kinds(gemma, command):
    answer = json.loads(command(f"explain --tokens 16k --ranks 4 --model {gemma} --json"))
    kinds = {kind["kind"]: kind for kind in answer["layer_kinds"]}
    assert (kinds["sliding"]["pattern"], kinds["sliding"]["layers"]) == ("window:512", [0, 1, 2, 3, 4, 6, 7])
    assert (kinds["full"]["pattern"], kinds["full"]["layers"]) == ("exact", [5])
    assert answer["step"]["forward_flops_of_all_ranks"] == sum(
        len(kind["layers"]) * kind["forward_flops_of_all_ranks"] for kind in kinds.values()
    )
    # All layers of a model are divided alike, as the pattern without a window asks for.
    call = {"seq_len": 16384, "world_size": 4, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    alike = explain("window:512", **call, layout="zigzag")
    assert answer["layout"] == "zigzag"
    assert kinds["sliding"]["ring_bytes"]["forward_sent"] == max(share.ring.forward.sent for share in alike.ranks)


def test_explain_prints_the_choices_with_their_reasons(gemma, command):
    printed = command(f"explain --tokens 128k --ranks 8 --pattern pyramid:512,3 --model {gemma}")
    assert "128k tokens over 8 ranks: 16384 each" in printed
    assert re.search(r"^layout +contiguous: with contiguous pieces", printed, re.MULTILINE)
    assert re.search(r"^transport, full +collective: the busiest of 8 ranks needs", printed, re.MULTILINE)
    assert re.search(r"^layers, sliding +0-4, 6-7 *$", printed, re.MULTILINE)
    assert re.search(r"^sliding +window:512 +7 ", printed, re.MULTILINE)
    assert re.search(r"^full +pyramid:512,3 +1 ", printed, re.MULTILINE)
    assert re.search(r"^a step +8 ", printed, re.MULTILINE)


HYBRID = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
HYBRID |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
#: A delta rule of Qwen3-Next: 4 heads of 32 x 64, of which two share keys.
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
DELTA |= {"linear_conv_kernel_dim": 4}


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_explain_counts_states_apart_from_attention(tokens, tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID, **DELTA, "model_type": "qwen3_next"}))
    words = f"explain --tokens {tokens} --ranks 4 --model {tmp_path} --batch-size 2"
    answer = json.loads(command(f"{words} --json"))
    assert answer["layer_kinds"][0]["layers"] == [3]
    # Two rows of a zigzag have two runs each on a rank: the last 3 inputs of 2 x 2 x 32 + 4 x 64 channels, and 4 x 32 x
    # (64 + 32) numbers in float32, which each rank sends to 3 others.
    sent = 3 * 4 * (384 * 3 * 2 + 4 * 32 * 96 * 4)
    mixers = answer["mixers"]
    assert (mixers["layers"], mixers["gathers"], mixers["most_work"]) == ([0, 1, 2], "states", 1)
    assert [mixers["bytes"][name] for name in mixers["bytes"] if name != "buffers"] == [sent] * 4
    of_layer = answer["layer_kinds"][0][f"{answer['layer_kinds'][0]['transport']}_bytes"]
    assert answer["step"]["bytes"]["backward_sent"] == of_layer["backward_sent"] + 3 * sent
    assert answer["step"]["layers"] == 1
    assert "states of 4 runs of each rank pass" in " ".join(command(words).split())


def test_explain_says_the_work_of_gathered_rows(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps({**HYBRID, "model_type": "minimax"}))
    words = f"explain --tokens 8192 --ranks 4 --model {tmp_path}"
    mixers = json.loads(command(f"{words} --json"))["mixers"]
    assert (mixers["gathers"], mixers["most_work"]) == ("rows", 4)
    assert mixers["bytes"]["forward_sent"] == mixers["bytes"]["backward_received"] == 3 * 2048 * 512 * 2
    assert "up to 4 times the work of one device in all" in " ".join(command(words).split())


def test_explain_refuses_a_model_that_is_not_computed(tmp_path, refusal):
    config = {"model_type": "bloom", "n_head": 8, "hidden_size": 64, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refusal(f"explain --tokens 64 --ranks 2 --model {tmp_path}")
    assert "models of type 'bloom' are not computed: BloomForCausalLM does not call" in error


def test_models_say_what_works_and_why_not(command):
    (bloom,) = json.loads(command("models bloom --json"))
    assert (bloom["status"], bloom["ring"]) == ("refused", False)
    assert "does not call Transformers' attention interface" in bloom["reason"]
    printed = command("models llama bloom")
    assert re.search(r"^llama +supported +yes +yes", printed, re.MULTILINE)
    assert re.search(r"^bloom +refused +no +no +BloomForCausalLM", printed, re.MULTILINE)
    by_reason = command("models").partition("Refused")[2]
    assert "bloom" in by_reason and "big_bird" in by_reason and "llama" not in by_reason.split()
    assert json.loads(command("models --json"))[0].keys() == bloom.keys()


def test_types_that_are_listed_are_answered_beside_others(capsys):
    with pytest.raises(SystemExit) as end:
        main("models gpt2 modernbert lama".split())
    printed = capsys.readouterr()
    assert end.value.code == 2
    assert re.search(r"^gpt2 +supported", printed.out, re.MULTILINE)
    assert "predict the next token, and 'modernbert' is of another kind: ra.patch_model(model) accepts" in printed.err
    with pytest.raises(SystemExit):
        main("models gpt2 lama --json".split())
    printed = capsys.readouterr()
    assert [model["model_type"] for model in json.loads(printed.out)] == ["gpt2"]
    assert "'lama' is not a model type of Transformers" in printed.err and "did you mean llama" in printed.err


def test_tables_fit_80_columns(gemma, command):
    for words in (
        f"explain --tokens 128k --ranks 8 --model {gemma} --pattern pyramid:512,3",
        f"estimate --seq-len 128k --devices 8 --memory 80GB --model {gemma}",
        "models",
    ):
        assert max(map(len, command(words).splitlines())) <= 80, words


def test_numbers_are_short():
    assert [short_count(n) for n in (131072, 1 << 20, 1000, 3 << 19)] == ["128k", "1M", "1000", "1536k"]
    assert [short_bytes(n) for n in (12, 1536, 5 << 20, 3 << 30, 1 << 40)] == [
        "12 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "1.0 TiB",
    ]  # fmt: skip
    assert [short_seconds(n) for n in (2.5, 0.0125, 3e-6, 4e-9)] == ["2.5 s", "12.5 ms", "3 µs", "4 ns"]
    assert layer_numbers([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
