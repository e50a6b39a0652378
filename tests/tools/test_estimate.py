"""Estimates: parameters are the model's own, memory is what real steps measure, and what is said to fit fits."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import memory
import pytest
import torch
from memory import ALL_STEPS, Step, model_of
from timing import Shape
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.tools import cli
from hf_ring_attention.tools.checks.tiny_models import tiny_config
from hf_ring_attention.tools.estimates.activations import layer_memory
from hf_ring_attention.tools.estimates.estimate import bound_of_peak
from hf_ring_attention.tools.estimates.model_shape import COUNTED, shape_of_model
from hf_ring_attention.tools.estimates.questions import longest_sequence, next_switches, smallest_ring
from hf_ring_attention.tools.estimates.step_time import schedule_of_ring, step_times
from tests.support.as_gpus import NO_DEEPSPEED
from tests.support.ranks import TIMEOUT, run_ranks

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = Shape(heads=4, kv_heads=2, head_dim=64)
#: An estimate may be off by so much of what was measured.
BOUND = 0.15


# ---- parameters


@pytest.mark.parametrize("model_type", COUNTED)
def test_formulas_count_the_parameters_of_the_model(model_type):
    config = tiny_config(model_type)
    counted, on_meta = shape_of_model(config), shape_of_model(config, on_meta=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert counted.parameters == on_meta.parameters == sum(p.numel() for p in model.parameters())
    assert counted.largest == on_meta.largest == max(p.numel() for p in model.parameters())
    assert [layer.parameters for layer in counted.layers] == [layer.parameters for layer in on_meta.layers]
    assert counted.tied == on_meta.tied
    assert [layer.mlp_width for layer in counted.layers] == [layer.mlp_width for layer in on_meta.layers]


def test_the_8b_model_has_the_parameters_that_its_name_says():
    assert shape_of_model(LLAMA_8B).parameters == 8_030_261_248  # as the model card of Llama 3.1 8B counts them


def test_other_types_are_counted_on_the_meta_device():
    answer = ra.estimate(tiny_config("gpt_oss"), 64)
    assert "meta" in answer.shape.counted_by and len(answer.exchanges) == 2  # windows and full attention
    layer = answer.shape.layers[0]
    assert 0 < layer.active_parameters(answer.shape.width) < layer.parameters


# ---- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_saves_what_autograd_saves(dtype, ranks):
    """The storages that autograd keeps, counted in a model of one layer and of two."""
    tokens = 64

    def saved(ring):
        sizes = []
        for layers in (1, 2):
            config = model_of(SMALL, tokens, False).config
            config.num_hidden_layers = layers
            model = AutoModelForCausalLM.from_config(config).to(dtype).train()
            ra.patch_model(model, "exact", ring=ring)
            weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
            ids = torch.arange(tokens)[None]
            storages = {}

            def keep(x, storages=storages, weights=weights):
                if x.untyped_storage().data_ptr() not in weights:
                    storages[x.untyped_storage().data_ptr()] = x
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = model(ids, labels=ids).loss
            sizes.append(sum(x.untyped_storage().nbytes() for x in storages.values()))
            del loss
        return (sizes[1] - sizes[0]) / (tokens // ring.world_size)

    measured = [saved(ra.Ring.alone())] if ranks == 1 else ra.run_simulated(saved, ranks, transport="ring")
    answer = ra.estimate(model_of(SMALL, tokens).config, tokens, devices=ranks, dtype=dtype)
    memory = layer_memory(answer.shape, answer.shape.layers[0], answer.setting, whole=ranks == 1)
    assert measured == [memory.saved] * ranks


def test_buffers_are_those_of_explain():
    answer = ra.estimate(LLAMA_8B, 65536, devices=4, pattern="window:4096")
    call = ra.explain("window:4096", seq_len=65536, world_size=4, num_heads=32, num_kv_heads=8, head_dim=128)
    exchange = answer.exchanges["window:4096"]
    assert exchange.decision == call.decision
    for name in ("ring", "collective", "heads"):
        assert exchange.buffers[name] == max(getattr(share, name).buffers for share in call.ranks) > 0
    assert exchange.pairs_of_all * 2 * 256 == sum(share.forward_flops for share in call.ranks)


def test_stages_divide_what_they_say():
    """Of 16 bytes a parameter: 8 divided by stage 1 (and its float32 copy), gradients by stage 2, weights by stage 3."""
    share = {
        parallel: {
            part.name: part.bytes / shape_of_model(LLAMA_8B).parameters
            for part in ra.estimate(LLAMA_8B, 1024, devices=8, parallel=parallel, accumulate=True).parts
        }
        for parallel in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    assert share["ddp"]["parameters"] == 4 and share["ddp"]["optimizer state"] == 8
    assert share["zero1"]["parameters"] == 2 and share["zero1"]["optimizer state"] == 12 / 8
    assert share["zero1"]["gradients"] == 2 and share["zero2"]["gradients"] == pytest.approx(2 / 8)
    assert share["zero3"]["parameters"] == share["zero3"]["gradients"] == pytest.approx(2 / 8)
    assert share["fsdp2"]["parameters"] == share["fsdp2"]["gradients"] == pytest.approx(4 / 8)


def test_every_switch_takes_memory_from_the_device():
    plain = ra.estimate(LLAMA_8B, 131072, devices=8, ring_size=4, parallel="ddp", checkpointing=False)
    names = [one.name.split("=")[0].split(" ")[0] for one in next_switches(plain)]
    assert {"checkpointing", "offload", "parallel", "ring_size", "offload_optimizer"} <= {*names}
    assert [one.gain for one in next_switches(plain)] == sorted(
        (one.gain for one in next_switches(plain)), reverse=True
    )
    shared = {"devices": 8, "ring_size": 4}
    whole, checkpointed, offloaded = (
        ra.estimate(LLAMA_8B, 131072, **shared, checkpointing=checkpointing, offload=offload)
        for checkpointing, offload in ((False, False), (True, False), (True, True))
    )
    assert whole.peak > checkpointed.peak > offloaded.peak
    assert offloaded.host == 32 * 4096 * 2 * 131072 // 4 and plain.host == 0


def test_the_parts_are_the_peak():
    answer = ra.estimate(LLAMA_8B, 1 << 18, devices=8, memory=80 * 10**9, overhead=123)
    assert answer.peak == sum(part.bytes for part in answer.parts) == max(answer.phases.values())
    assert all(part.formula and part.source for part in answer.parts)
    assert {part.name: part.bytes for part in answer.parts}["framework"] == 123


# ---- the inverse questions


@pytest.mark.parametrize("pattern", ["exact", "window:4096", "pyramid:512,3"])
@pytest.mark.parametrize("transport", ["auto", "ring", "heads"])
def test_what_is_said_to_fit_fits(pattern, transport):
    """Searches bound the buffers, and the plan of what they found holds no more."""
    asked = {"devices": 8, "memory": 40 * 10**9, "pattern": pattern, "transport": transport}
    answer = ra.estimate(LLAMA_8B, 65536, **asked)
    assert bound_of_peak(answer.shape, answer.setting) >= answer.peak
    tokens = longest_sequence(answer)
    longest = ra.estimate(LLAMA_8B, tokens, **asked)
    assert longest.fits
    much_longer = ra.estimate(LLAMA_8B, tokens * 5 // 4 // 16 * 16, **asked)
    assert not much_longer.fits


def test_the_smallest_ring_holds_the_sequence_and_half_of_it_does_not():
    answer = ra.estimate(LLAMA_8B, 1 << 19, devices=16, memory=60 * 10**9)
    size, devices = smallest_ring(answer)
    assert devices == 16 and 1 < size < 16
    fitting = dataclasses.replace(answer.setting, ring_size=size)
    assert bound_of_peak(answer.shape, fitting) <= answer.memory
    assert bound_of_peak(answer.shape, dataclasses.replace(fitting, ring_size=size // 2)) > answer.memory
    assert smallest_ring(ra.estimate(LLAMA_8B, 1 << 20, devices=2, memory=40 * 10**9))[1] > 2
    assert longest_sequence(ra.estimate(LLAMA_8B, 64, memory=10**9)) is None


# ---- time


def test_times_are_those_of_the_schedule():
    answer = ra.estimate(LLAMA_8B, 1 << 17, devices=4)
    fast, slow = (step_times(answer, 4e14, bandwidth) for bandwidth in (1e15, 1e8))
    seconds = {part.name: part.seconds for part in fast}
    tokens = 1 << 15
    assert seconds["products with weights"] == pytest.approx(
        2 * tokens * (4 * (8_030_261_248 - 2 * 128256 * 4096) + 3 * 128256 * 4096) / 4e14, rel=1e-3
    )
    pairs = (1 << 17) * ((1 << 17) + 1) // 2 * 32 / 4
    assert seconds["attention"] == pytest.approx(32 * pairs * 2 * 256 * 4.5 / 4e14, rel=1e-3)
    assert seconds["waiting for keys"] == pytest.approx(0, abs=1e-3 * seconds["attention"])
    assert {part.name: part.seconds for part in slow}["waiting for keys"] > seconds["attention"]
    timeline = schedule_of_ring(answer, answer.exchanges["exact"], 4e14, 1e15)
    assert timeline.seconds == pytest.approx(pairs * 2 * 256 / 4e14, rel=1e-3)


# ---- wrong arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "devices must be an integer of at least 1, got 0"),
        ({"devices": 6, "ring_size": 4}, "6 devices do not divide into rings of 4: 6 = 1 .* 2"),
        ({"parallel": "zero4"}, "parallel must be one of ddp, fsdp2"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"pattern": "windw:4"}, "windw"),
        ({"devices": 3, "transport": "heads"}, "32 / 3"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ra.estimate(LLAMA_8B, 4096, **changes)


@pytest.mark.parametrize(
    "model", [3, {"model_type": "mamba", "hidden_size": 8, "vocab_size": 8}, {"model_type": "llama"}]
)
def test_wrong_models_are_refused(model):
    with pytest.raises(ValueError, match="estimate: "):
        ra.estimate(model, 4096)


# ---- the command


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def in_python(script, *words):
    """What a new process prints that runs a script with these arguments."""
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def test_the_command_needs_no_torch(folder):
    script = """
        import sys

        sys.modules["torch"] = None  # any import of it fails
        from hf_ring_attention.tools.cli import main

        main()
    """
    command = ["estimate", "--model", folder, "--seq-len", "1M", "--devices", "8", "--memory", "80GB", "--json"]
    done = in_python(script, *command)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures["peak"] == sum(part["bytes"] for part in figures["parts"] if not part["host"])
    assert figures["fits"] is (figures["peak"] <= 80 * 10**9)
    assert figures["exchanges"]["exact"]["buffers"]["ring"] == 131072 * 8 * 512
    assert figures["longest_sequence"] > 1 << 19 and figures["smallest_ring"] == {"ring_size": 16, "devices": 16}


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not tell what a process held at most"
)
def test_the_resident_set_of_the_largest_question_is_small(folder):
    """A million tokens over 64 devices: the whole program never holds 500 MB."""
    script = """
        import atexit, sys
        from pathlib import Path
        from hf_ring_attention.tools.cli import main

        atexit.register(lambda: print(Path("/proc/self/status").read_text(), file=sys.stderr))
        main()
    """
    command = ["estimate", "--model", folder, "--seq-len", "1M", "--devices", "64", "--memory", "80GB", "--json"]
    done = in_python(script, *command)
    assert done.returncode == 0, done.stderr
    held = next(line.split()[1] for line in done.stderr.splitlines() if line.startswith("VmHWM"))
    assert 1024 * int(held) < 500 * 10**6


def test_the_table_says_all_and_the_picture_is_drawn(folder, tmp_path, capsys):
    picture = tmp_path / "estimate.png"
    words = (
        f"estimate --model {folder} --seq-len 256k --devices 4 --memory 60GB --tflops 400 --gbps 400 --plot {picture}"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert not ended.value.code
    text = capsys.readouterr().out
    for expected in (
        "peak of a device",
        "does not fit",
        "longest sequence",
        "smallest ring",
        "set offload:",
        "waiting for keys",
    ):
        assert expected in text
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--devices 6 --ring-size 4", "6 = 1 * 4 + 2"),
        ("--tflops 400", "--gbps"),
        ("--memory 80", "80GB"),
        ("--plot nowhere/a.png", "no folder"),
        ("--tflops 4 --measure --gbps 4", "--tflops"),
    ],
)
def test_wrong_arguments_end_in_one_line(folder, words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["estimate", "--model", folder, "--seq-len", "4k", *words.split()])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


# ---- real steps


def peak_of_step(rank, shape, step):
    """The bytes of the busiest rank, as `recipes/bench/memory.py` measures them; DeepSpeed has ZeRO."""
    if step.parallel == "zero2":
        memory.in_parallel = in_deepspeed
    return sum(memory.parts_of_step(shape, step).values())


def in_deepspeed(model, step):
    """As `memory.in_parallel`; the engine's step frees gradients, so that the optimizer's has nothing left to do."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # with these it would compile operators of its own
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    settings = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, **settings}
    adam = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, dist_init_required=False, config=config)
    engine.train()

    def backward(loss):
        engine.backward(loss)
        engine.step()

    return engine, backward, torch.optim.SGD([torch.zeros(1)])


def error_of(shape, step):
    """By how much of the measured peak the estimate is off."""
    return memory.estimate_of(shape, step) / run_ranks(peak_of_step, step.devices, shape, step)[0] - 1


def test_an_estimate_is_near_the_peak_of_a_real_step():
    """Activations are most of what a step of a small model holds."""
    assert abs(error_of(SMALL, Step(1024, checkpointing=False, pattern="window:64"))) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("step", [*ALL_STEPS, Step(8192, 2, 2, "zero2", pattern="window:256")], ids=str)
def test_estimates_are_near_the_peaks_of_real_steps(step):
    """Sizes, checkpointing, offloading, rings of 1, 2 and 4, DDP, FSDP 2 and ZeRO 2."""
    if step.parallel == "zero2":
        pytest.importorskip("deepspeed", reason=NO_DEEPSPEED)
    assert abs(error_of(Shape(heads=8, kv_heads=4, head_dim=64), step)) <= BOUND


def test_the_steps_are_of_every_kind():
    assert len(ALL_STEPS) >= 8 and {step.ring_size for step in ALL_STEPS} == {1, 2, 4}
    assert {step.parallel for step in ALL_STEPS} == {"ddp", "fsdp2"}
    assert {step.checkpointing for step in ALL_STEPS} == {step.offload for step in ALL_STEPS} == {True, False}
