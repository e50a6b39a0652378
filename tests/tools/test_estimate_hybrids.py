"""Estimates of hybrids: what mixers save and work with is what real models of real tensors save and work with."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.compute.private import checkpoint_activations
from hf_ring_attention.hf.hybrid_types import MIXERS
from hf_ring_attention.hf.support import mixers_of
from hf_ring_attention.hybrids.mixers import MOST_GATHERED
from hf_ring_attention.plan.patterns import Pattern
from hf_ring_attention.tools import cli
from hf_ring_attention.tools.checks.tiny_models import VOCAB, tiny_config
from hf_ring_attention.tools.estimates.activations import layer_memory
from hf_ring_attention.tools.estimates.exchange import traffic_of_mixer
from hf_ring_attention.tools.estimates.hybrid_layers import layers_of_hybrid
from hf_ring_attention.tools.estimates.live_bytes import LiveBytes
from hf_ring_attention.tools.estimates.mixer_memory import MeasuredMixer
from hf_ring_attention.tools.estimates.model_shape import shape_of_model
from hf_ring_attention.tools.estimates.questions import longest_sequence, smallest_ring
from hf_ring_attention.tools.estimates.step_time import step_times
from hf_ring_attention.tools.model_config import attention_of_config

from ..support.releases import needs_mixers

pytestmark = needs_mixers

#: One of each kind of mixer, and of each way in which layers have mixers, attention and MLPs.
TYPES = ("bamba", "qwen3_next", "lfm2", "jamba", "falcon_h1", "nemotron_h", "kimi_linear")
#: An estimate may be off by so much of what was measured.
BOUND = 0.15


def on_meta(model_type):
    """A tiny model on the meta device, and its config."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config), config


def saved_bytes(model, ids, **inputs):
    """The bytes of the storages that autograd keeps of the layers of a model."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = model.model(ids, use_cache=False, **inputs)
    del out
    return sum(x.untyped_storage().nbytes() for x in storages.values())


def estimated_bytes(answer, whole=True):
    """What the layers of an estimate save, all tokens of a rank together."""
    memories = [layer_memory(answer.shape, layer, answer.setting, whole) for layer in answer.shape.layers]
    return sum(answer.setting.local_tokens * one.saved + one.mixer_saved for one in memories)


@pytest.mark.parametrize("model_type", MIXERS)
def test_the_parameters_are_the_models(model_type):
    model, config = on_meta(model_type)
    shape = shape_of_model(config)
    layers = model.model.layers
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert [one.parameters for one in shape.layers] == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    own = sum(one.parameters - one.shared for one in shape.layers)
    assert own == sum(p.numel() for p in layers.parameters())  # Zamba's layers share some.
    mixing = [number for number, layer in enumerate(layers) if mixers_of(layer, config)]
    assert [number for number, one in enumerate(shape.layers) if one.mixer is not None] == mixing


def test_layers_have_the_modules_that_they_have():
    nemotron, falcon = (shape_of_model(tiny_config(model_type)).layers for model_type in ("nemotron_h", "falcon_h1"))
    modules = [(one.mixer is not None, one.attends, one.mlp_width, one.experts) for one in nemotron]
    # Of 4 experts of 16 features a token passes 2, and the shared one.
    assert modules == [(True, False, 0, 0), (False, False, 48, 4), (False, True, 0, 0), (False, False, 64, 0)]
    assert all(one.mixer is not None and one.attends and one.mlp_width == 64 and one.gated for one in falcon)
    assert falcon[0].mixer is falcon[1].mixer  # Equal ones are measured once.


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_save_what_autograd_saves(model_type):
    config, tokens = tiny_config(model_type), 128
    model = AutoModelForCausalLM.from_config(config).float().train()
    ra.patch_model(model, "exact")
    few, many = (saved_bytes(model, torch.arange(n)[None] % VOCAB) for n in (tokens, 2 * tokens))
    small, large = (estimated_bytes(ra.estimate(config, n, dtype="float32")) for n in (tokens, 2 * tokens))
    assert large - small == pytest.approx(many - few, rel=BOUND)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("model_type", ["bamba", "lfm2", "minimax"])
def test_a_rank_saves_what_autograd_saves(model_type, layout):
    """States that pass, and rows that are gathered, on the busiest of two ranks."""
    config = tiny_config(model_type)

    def work(ring):
        model = AutoModelForCausalLM.from_config(config).float().train()
        ra.patch_model(model, "exact", ring=ring)
        sizes = []
        for tokens in (512, 1024):
            ids = torch.arange(tokens)[None] % VOCAB
            sizes.append(saved_bytes(model, ids))
        return sizes[1] - sizes[0]

    measured = max(ra.run_simulated(work, 2, layout=layout, transport="ring"))
    small, large = (
        estimated_bytes(ra.estimate(config, n, devices=2, dtype="float32", layout=layout), whole=False)
        for n in (512, 1024)
    )
    assert large - small == pytest.approx(measured, rel=BOUND)


@pytest.mark.parametrize("passing", [False, True])
@pytest.mark.parametrize("model_type", ["bamba", "qwen3_next", "lfm2"])
def test_bytes_at_other_lengths_follow_from_those_measured(model_type, passing):
    """Also where they grow with the square of the length, and over rings of more ranks than were measured."""
    model, config = on_meta(model_type)
    mixer = MeasuredMixer(mixers_of(model, config)[0][1], config.hidden_size)
    growth, ranks = mixer.growth("bfloat16", passing), 5 if passing else 1
    saved, peak = mixer.bytes_at(1280, "bfloat16", ranks)
    assert growth.saved.at(1280, 1, ranks) == pytest.approx(saved, rel=1e-3)
    assert growth.peak.at(1280, 1, ranks) == pytest.approx(peak, rel=1e-3)
    assert (growth.peak.by_square > 0) == (model_type == "bamba")


def peaks_of_step(model_type, checkpointing):
    """The most bytes of the tensors of a real training step, and of its estimate."""
    config, tokens = tiny_config(model_type, max_position_embeddings=512), 512
    ids = torch.arange(tokens)[None] % VOCAB
    with LiveBytes() as live:
        model = AutoModelForCausalLM.from_config(config).float().train()
        ra.patch_model(model, "exact", ring=ra.Ring.alone())
        if checkpointing:
            checkpoint_activations(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        live.peak = 0
        for _ in range(2):  # The optimizer has its state from the first step on.
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    answer = ra.estimate(
        config,
        tokens,
        dtype="float32",
        parallel="ddp",
        device="cpu",
        checkpointing=checkpointing,
    )
    return live.peak, answer.peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "falcon_h1"])
def test_an_estimate_is_near_the_peak_of_a_real_step(model_type, checkpointing):
    measured, estimated = peaks_of_step(model_type, checkpointing)
    assert measured > 4 << 20
    assert estimated == pytest.approx(measured, rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", MIXERS)
def test_estimates_of_all_types_are_near_the_peaks_of_real_steps(model_type, checkpointing):
    measured, estimated = peaks_of_step(model_type, checkpointing)
    assert estimated == pytest.approx(measured, rel=BOUND), f"{estimated / measured - 1:+.1%}"


def test_times_and_buffers_have_those_of_states():
    config = tiny_config("qwen3_next")
    answer = ra.estimate(config, 1 << 16, devices=4)
    assert answer.phases["backward of layer 0"] > answer.phases["optimizer step"]
    traffic = traffic_of_mixer(answer.shape, answer.setting)
    (part,) = [part for part in answer.parts if part.name == "exchange buffers"]
    assert answer.peak_phase == "backward of layer 0" and part.bytes == traffic.buffers > 0
    seconds = {one.name: one for one in step_times(answer, 4e14, 1e9)}
    received = 2 * traffic.forward.received + traffic.backward.received  # Checkpointing gathers again.
    assert seconds["waiting for states"].seconds == pytest.approx(received / 1e9)
    assert "recurrences" in seconds["products with weights"].formula
    assert traffic_of_mixer(answer.shape, ra.estimate(config, 1 << 16).setting) is None


def test_rows_that_no_mixer_would_gather_are_refused():
    config = tiny_config("minimax")
    most = MOST_GATHERED // (config.hidden_size * 2)
    answer = ra.estimate(config, 1 << 12, devices=2, memory=1 << 50)
    assert longest_sequence(answer) == most
    with pytest.raises(ValueError, match=f"whole rows: 1 x {2 * most} tokens x 32 x 2 bytes"):
        ra.estimate(config, 2 * most, devices=2)
    assert smallest_ring(ra.estimate(config, 2 * most, devices=2, ring_size=1, memory=1 << 50)) == (1, 2)


def test_a_config_that_names_other_mixers_is_refused():
    model, config = on_meta("bamba")
    attention = attention_of_config(config.to_dict(), "bamba")
    other = replace(attention, mixers=replace(attention.mixers, layers=(1,)))
    with pytest.raises(ValueError, match=r"by its config, layer 1 of 'bamba' has a mixer, but .* has none there"):
        layers_of_hybrid(model, model.model.layers, config.to_dict(), other, config.hidden_size)


def test_a_mixer_that_does_not_run_without_data_is_refused(monkeypatch):
    def forward(self, hidden_states, **kwargs):
        return hidden_states * hidden_states.sum().item()

    model, config = on_meta("lfm2")
    (_, module), *_ = mixers_of(model, config)
    monkeypatch.setattr(type(module), "forward", forward)
    with pytest.raises(ValueError, match="what Lfm2ShortConv saves is measured on torch's meta device, where its code"):
        MeasuredMixer(module, config.hidden_size).growth("float32", False)


@pytest.fixture
def folder(tmp_path):
    config = tiny_config("nemotron_h")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return str(tmp_path)


def ended_well(words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    return not ended.value.code


def test_the_command_tells_of_a_hybrid(folder, capsys):
    words = f"estimate --model {folder} --seq-len 64k --devices 2 --memory 8GB --no-checkpointing --tflops 4 --gbps 40"
    assert ended_well(words)
    table = capsys.readouterr().out
    for expected in ("bytes of mixers", "peak of a device", "longest sequence", "waiting for states"):
        assert expected in table
    assert ended_well(f"{words} --json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak"] == sum(part["bytes"] for part in figures["parts"] if not part["host"])
    saved = next(part for part in figures["parts"] if part["name"] == "saved activations")
    assert "meta device" in saved["source"] and "kernels" in saved["source"]
    assert Pattern.exact() == Pattern.parse(next(iter(figures["exchanges"])))
