"""Estimates of hybrids: parameters and layers are the model's own, and uncounted memory is named, or refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

import hf_ring_attention as ra
from hf_ring_attention.cli import main as cli
from hf_ring_attention.cost.questions import longest_sequence, next_switches, smallest_ring
from hf_ring_attention.cost.shape import shape_of_model
from hf_ring_attention.cost.trace import LiveBytes
from hf_ring_attention.hf.model.types import MIXERS
from hf_ring_attention.hybrids.mixers import MOST_GATHERED
from hf_ring_attention.hybrids.models import mixers_of
from tests.support.tiny_models import VOCAB, tiny_config


@pytest.mark.parametrize("model_type", MIXERS)
def test_the_parameters_are_the_models(model_type):
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape, layers = shape_of_model(config), model.model.layers
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert [one.parameters for one in shape.layers] == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    own = sum(one.parameters - one.shared for one in shape.layers)
    assert own == sum(p.numel() for p in layers.parameters())  # Zamba's layers share some.
    mixing = tuple(number for number, layer in enumerate(layers) if mixers_of(layer, config))
    assert shape.attention.mixers.layers == mixing


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "lfm2"])
def test_an_estimate_is_at_most_the_peak_of_a_real_step(model_type):
    config, tokens = tiny_config(model_type, max_position_embeddings=512), 512
    ids = torch.arange(tokens)[None] % VOCAB
    with LiveBytes() as live:
        model = AutoModelForCausalLM.from_config(config).float().train()
        ra.patch_model(model, "exact", ring=ra.Ring.alone())
        model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        live.peak = 0
        for _ in range(2):  # The optimizer has its state from the first step on.
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    answer = ra.estimate(config, tokens, dtype="float32", parallel="ddp", device="cpu")
    assert live.peak / 10 < answer.peak < 1.15 * live.peak
    assert answer.not_counted and "at least" in str(answer)


def test_what_sees_is_not_counted():
    config = Gemma3Config(text_config=tiny_config("gemma3_text").to_dict())
    answer = ra.estimate(config, 1 << 10, memory=1 << 50)
    assert answer.not_counted == "the parts of gemma3 beside its text model, so the peak may be higher"
    assert answer.fits is None and ra.estimate(config.text_config, 1 << 10).not_counted is None


def test_whether_a_hybrid_fits_is_known_only_if_it_does_not():
    config = tiny_config("qwen3_next")
    small, large = (ra.estimate(config, 1 << 14, devices=2, memory=memory) for memory in (1 << 10, 1 << 50))
    assert (small.fits, large.fits) == (False, None)
    assert {one.fits for one in next_switches(small)} == {False}
    assert {one.fits for one in next_switches(large)} == {None}
    with pytest.raises(ValueError, match="a hybrid's uncounted mixers decide the peak without checkpointing"):
        ra.estimate(config, 1 << 14, checkpointing=False)


def test_rows_that_no_mixer_would_gather_are_refused():
    config = tiny_config("minimax")
    most = MOST_GATHERED // (config.hidden_size * 2)
    answer = ra.estimate(config, 1 << 12, devices=2, memory=1 << 50)
    assert longest_sequence(answer) == most
    with pytest.raises(ValueError, match=f"mixers gather rows of {2 * MOST_GATHERED} bytes"):
        ra.estimate(config, 2 * most, devices=2)
    assert smallest_ring(ra.estimate(config, 2 * most, devices=2, ring_size=1, memory=1 << 50)) == (1, 2)


def test_the_command_names_what_is_not_counted(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("nemotron_h").to_dict()))
    words = f"estimate --model {tmp_path} --tokens 64k --ranks 2 --memory 8GB"
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert not ended.value.code
    table = " ".join(capsys.readouterr().out.split())
    for expected in ("peak of a device, at least", "may fit: ", "longest sequence that may fit", "mixers in 1 layers"):
        assert expected in table
