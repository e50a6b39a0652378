"""Calibration agrees with dense attention, chooses within its budget, resumes after it was stopped, and refuses bad input."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, ModernBertConfig, ModernBertForMaskedLM

import hf_ring_attention as ra
from hf_ring_attention.evaluation.calibration import calibrate as calibrate_module
from hf_ring_attention.evaluation.calibration import search
from hf_ring_attention.evaluation.calibration.passes import measure_text
from hf_ring_attention.evaluation.calibration.texts import plain_text
from hf_ring_attention.evaluation.whole_files import own_folder, whole_file, write_whole
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.calibrations import MENU, calibrated, model_of, random_texts
from tests.support.checkpoints import save_calibration
from tests.support.neighbours import with_lora
from tests.support.ranks import run_simulated
from tests.support.refusals import refused
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.tolerance import float64
from tests.support.training import SIZES


def test_a_pass_leaves_a_model_as_it_was(rng):
    def settings():
        return [x.requires_grad for x in model.parameters()], [module.training for module in model.modules()]

    model = model_of().train()
    next(model.parameters()).requires_grad_(False)
    before = settings()
    calibrated(model, random_texts(rng, 1, 64))
    assert settings() == before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("tap" in name for module in model.modules() for name in vars(module))
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_calibration_keeps_its_budget_and_is_set_saved_and_loaded(rng, tmp_path):
    model, texts = model_of(3), random_texts(rng)
    budget = rng.uniform(0.2, 0.9)
    chosen = calibrated(model, texts, budget=budget)
    assert 0 < chosen.flop_share <= budget
    assert getattr(model.config, "ring_dilated", None) is None
    share = np.mean([p.flop_share(chosen.seq_len, num_kv_heads=2) for p in chosen.layers.values()])
    assert chosen.flop_share == pytest.approx(share)
    chosen.save(tmp_path / "chosen.json")
    assert ra.Calibration.load(tmp_path / "chosen.json") == chosen

    patched = ra.patch_model(ra.patch_model(model_of(3), "window:2"), chosen)
    for text, figures in zip(texts, chosen.texts):
        report = ra.perplexity(patched, text)
        assert report.nll / report.tokens == pytest.approx(figures.chosen_nll, rel=1e-6)
        exact = ra.perplexity(model_of(3), text)
        assert exact.nll / exact.tokens == pytest.approx(figures.exact_nll, rel=1e-6)
        assert figures.perplexity_ratio == pytest.approx(report.perplexity / exact.perplexity, rel=1e-5)
    by_file = ra.patch_model(model_of(3), str(tmp_path / "chosen.json"))
    assert by_file.config.ring_dilated == patched.config.ring_dilated
    patched.save_pretrained(tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config._attn_implementation == "ring_dilated"
    assert torch.equal(loaded(texts[0][None]).logits, patched(texts[0][None]).logits)


def test_scores_find_the_head_that_looks_far(rng):
    """A head is made to matter that no window can serve; under a budget for one exact head, it is the one."""
    model = model_of(2)
    layer, head = rng.randrange(2), rng.randrange(2)
    with torch.no_grad():
        for number, one in enumerate(model.model.layers):
            width = one.self_attn.o_proj.in_features // 2
            for other in range(2):
                if (number, other) != (layer, head):
                    one.self_attn.o_proj.weight[:, other * width : (other + 1) * width] *= 1e-3
    chosen = calibrated(model, random_texts(rng), menu=["window:4", "exact"], budget=0.4)
    heads = [(number, other, one) for number, every in chosen.of_heads().items() for other, one in enumerate(every)]
    assert [(number, other) for number, other, one in heads if one == ra.Pattern.exact()] == [(layer, head)]


def test_two_ranks_choose_what_one_process_chooses(rng):
    texts = random_texts(rng)
    with float64():
        models = [model_of() for _ in range(3)]
        alone = calibrated(models[2], texts)
        of_ranks = run_simulated(lambda ring: calibrated(models[ring.rank], texts, ring=ring), 2, transport="ring")
    for of_rank in of_ranks:
        assert of_rank.layers == alone.layers
        for layer, heads in alone.scores.items():
            # Products are kept in float32.
            assert np.allclose(of_rank.scores[layer], heads, rtol=1e-6, atol=1e-6 * np.max(heads))


class Killed(BaseException):
    """Ends a run in the middle."""


@pytest.fixture
def passes(monkeypatch):
    """A list that gets the text of each pass; a pass whose number is in `killed` ends the run."""

    class Passes(list):
        killed = ()

    passes = Passes()

    def counted(model, ring, text, menu=(), *args):
        if menu:  # Forward passes do not count.
            passes.append(text)
            if len(passes) in passes.killed:
                raise Killed
        return measure_text(model, ring, text, menu, *args)

    monkeypatch.setattr(search, "measure_text", counted)
    return passes


def test_a_killed_run_continues_and_measures_nothing_twice(rng, tmp_path, passes):
    texts, folder = random_texts(rng, 3), tmp_path / "folder"
    whole = calibrated(model_of(), texts)
    passes.clear()
    passes.killed = {rng.randrange(2, 7)}
    with pytest.raises(Killed):
        calibrated(model_of(), texts, folder=folder)
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.pt")}
    assert before
    assert calibrated(model_of(), texts, folder=folder) == whole
    assert len(passes) == 1 + 3 + 1 + 3  # Each of three texts twice, the retrieval text, and the killed pass.
    assert all((folder / name).stat().st_mtime_ns == time for name, time in before.items())
    # Another budget reuses the first passes, and another menu does not.
    calibrated(model_of(), texts, folder=folder, budget=0.7, refinements=0)
    assert len(passes) == 8
    calibrated(model_of(), texts, folder=folder, menu=MENU[1:], refinements=0)
    assert len(passes) == 8 + 4
    assert calibrated(model_of(), texts, folder=folder) == whole and len(passes) == 12


def test_another_model_is_measured_anew(rng, tmp_path, passes):
    texts, model = random_texts(rng, 1), model_of()

    def measured():
        before = len(passes)
        calibrated(model, texts, folder=tmp_path, refinements=0)
        return len(passes) - before

    assert measured() == 2
    ra.patch_model(model, "window:4+1")  # The measurement does not depend on patterns.
    assert measured() == 0
    model.config.rms_norm_eps *= 2
    assert measured() == 2
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.view(-1)[-1] += 1e-3
    assert measured() == 2
    tuned = model = with_lora(model)
    assert (measured(), measured()) == (2, 0)
    with tuned.disable_adapter():
        assert measured() == 2
    tuned.add_adapter("other", tuned.peft_config["default"])
    tuned.set_adapter("other")
    assert measured() == 2


def test_a_calibration_of_another_model_is_refused(rng):
    chosen = calibrated(model_of(2), random_texts(rng), refinements=0)
    refused("the calibration is of a model of 2 layers, and LlamaModel has 3;", ra.patch_model, model_of(3), chosen)
    other = tiny_model("gemma3_text", "ring_dilated", num_hidden_layers=2, num_key_value_heads=2)
    assert other.config.layer_types[0] == "sliding_attention"
    refused(r"it has patterns for \[0.*\], needed are \[.*\]: calibrate", ra.patch_model, other, chosen)


def test_a_folder_that_cannot_be_used_is_refused_on_all_ranks(rng, tmp_path):
    """Another run writes to it, it is a file, or a measurement in it is damaged."""
    texts, models = random_texts(rng), [model_of() for _ in range(2)]

    def refused(folder, message, own=ValueError):
        def call(ring):
            with pytest.raises(own if ring.rank == 0 else ValueError, match=message):
                calibrated(models[ring.rank], texts, ring=ring, folder=folder, refinements=0)

        run_simulated(call, 2)

    with own_folder(tmp_path / "busy"):
        refused(tmp_path / "busy", "another process writes to the folder")
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "file", FileExistsError)
    calibrated(model_of(), texts, folder=tmp_path / "done", refinements=0)
    damaged = next((tmp_path / "done").glob("losses-*.pt"))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    refused(tmp_path / "done", f"{damaged.name} is damaged: delete it, and it is measured again")


def test_the_bar_moves_in_a_backward_pass(rng, monkeypatch):
    """By each layer that checkpointing computes again: a pass of two layers moves it four times."""
    moves = []
    monkeypatch.setattr(tqdm, "update", lambda bar, n=1: bar.disable or n == 0 or moves.append(n))
    (text,) = random_texts(rng, 1, 64)
    calibrated(model_of(layers=2), [text], progress=True, refinements=0, retrieval=0)
    forward = 64 / 2
    backward = search.BACKWARD_PASS * forward
    assert moves == [forward, forward, backward, backward, *[forward] * (len(moves) - 4)] and sum(moves) % 64 == 0


def test_the_bar_counts_what_was_measured_before(rng, tmp_path, monkeypatch):
    bars, make = [], calibrate_module.progress_bar
    monkeypatch.setattr(calibrate_module, "progress_bar", lambda *x, **y: bars.append(make(*x, **y)) or bars[-1])
    texts, model = random_texts(rng), model_of()
    for _ in range(2):
        calibrated(model, texts, folder=tmp_path / "measured", progress=True)
    # A choice that is the last one again is not tried.
    tokens = sum(map(len, texts))
    assert bars[0].n == pytest.approx(bars[0].total) or bars[0].n == pytest.approx(bars[0].total - tokens)
    assert bars[0].total - bars[1].total == pytest.approx(bars[0].n - bars[1].n)


def test_the_next_choice_is_kept_if_it_is_nearer_to_exact_attention(rng):
    texts = random_texts(rng)
    ring, divergences = ra.Ring.alone(), []
    for refinements in (0, 1):
        chosen = calibrated(model_of(3), texts, refinements=refinements)
        model, total = model_of(3), 0.0
        for ids in texts:
            text = plain_text(ids, 0)
            _, exact = measure_text(ra.patch_model(model_of(3), "exact", ring), ring, text)
            found, _ = measure_text(ra.patch_model(model, chosen, ring), ring, text, exact=exact)
            total += found.divergence * text.num_scored
        divergences.append(total)
    assert divergences[0] * (1 + 1e-9) >= divergences[1]


def test_a_budget_of_the_bytes_of_a_ring(rng):
    chosen = calibrated(model_of(3), random_texts(rng), budget=0.6, budget_of="bytes", ranks=4)
    assert chosen.ranks == 4 and 0 < chosen.share("bytes") <= 0.6
    assert ra.Calibration.from_dict(chosen.to_dict()) == chosen
    other = calibrated(model_of(3), random_texts(rng), budget=0.6, refinements=0)
    assert other.ranks is None
    refused("a ring that moves bytes: ranks must be an integer of at least 2, got None", other.share, "bytes")


def test_a_budget_of_the_cache(rng):
    """The cost is what the model's cache holds after a text: a dilated segment keeps half of the rows and reads few."""
    model, [ids, *_] = model_of(3), random_texts(rng)
    menu, most = ["window:4+1", "window:16+2", "branches:window=4,segment=all/2@count", "exact"], len(ids)
    chosen = calibrated(model, [ids], menu=menu, budget=0.5, budget_of="cache")
    assert chosen.budget_of == "cache" and 0 < chosen.share("cache") <= 0.5
    assert ra.Calibration.from_dict(chosen.to_dict()) == chosen
    cache = ra.PatternCache(ra.patch_model(model, chosen))
    with torch.no_grad():
        model(ids[None, :-1], **cache_argument(cache))
        model(ids[None, -1:], **cache_argument(cache))
    rows = sum(len(part.heads or (0, 1)) * part.table.num_slots for layer in cache.layers for part in layer.rows)
    assert rows == pytest.approx(chosen.share("cache") * 3 * 2 * most, abs=3 * 2)
    by_flops = calibrated(model_of(3), [ids], menu=menu, budget=0.5, refinements=0)
    assert by_flops.budget_of == "flops"
    dilated, exact = (ra.Pattern.parse(text) for text in menu[2:])
    assert chosen.share_of(dilated, "cache") > 0.5 > chosen.share_of(dilated)
    assert chosen.share_of(exact, "cache") == 1


def test_layers_with_windows_keep_them(rng):
    texts = random_texts(rng)
    model = tiny_model("gemma3_text", "ring_dilated")
    full = {n for n, kind in enumerate(model.config.layer_types) if kind == "full_attention"}
    assert full and full != set(range(model.config.num_hidden_layers))
    chosen = calibrated(model, texts)
    assert chosen.layers.keys() == full
    with pytest.raises(NotImplementedError, match="every layer of MistralForCausalLM has its own window"):
        calibrated(tiny_model("mistral", "ring_dilated", sliding_window=8), texts)


def a_text(first, *shape):
    return torch.full(shape, first)


MASKED = ModernBertForMaskedLM(ModernBertConfig(**SIZES, pad_token_id=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget must be a share above 0 and at most 1, got 0"),
        ({"budget": 0.001}, r"is below the cheapest pattern of the menu, window:4\+1: \d+ / \d+ = 0\.\d+ of exact"),
        ({"budget_of": "rows"}, "budget_of must be one of 'flops', 'cache_reads', 'cache', 'bytes', got 'rows'"),
        ({"budget_of": "bytes"}, "a ring that moves bytes: ranks must be an integer of at least 2, got 1"),
        ({"ranks": 4}, "ranks=4 needs budget_of='bytes', got 'flops': leave it out"),
        ({"menu": ["exact"]}, "menu must have 2 or more patterns to choose from, got 1"),
        ({"menu": "exact"}, "menu must be a list"),
        ({"menu": ["exact", "window:4+1", "window:4+1"]}, r"menu has window:4\+1 twice"),
        ({"menu": ["exact", "kv0=exact;kv1=window:4"]}, "differs by heads"),
        ({"menu": ["exact", "windy:4"]}, "calibrate: menu: .*windy"),
        ({"retrieval": -1}, "retrieval must be a weight"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"texts": "text"}, "texts must be a list with the token ids"),
        ({"texts": [a_text(3, 70), a_text(3, 1)]}, "text 1 must have 2 or more tokens, got 1"),
        ({"texts": [a_text(3, 37)]}, "text 0 must have 64 or more tokens, got 37: .* or retrieval=0"),
        ({"texts": [a_text(3, 2, 80)]}, r"text 0 must be \[tokens\], got \[2, 80\]"),
        ({"texts": [a_text(VOCAB, 80)]}, "calibrate: input_ids must be from 0"),
        ({"model": MASKED}, "calibrate: ModernBertForMaskedLM does not compute the loss of next tokens"),
        ({"model": nn.Linear(2, 2)}, "calibrate: expected a Transformers model"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_calls_are_refused(options, message, rng):
    given = {"model": model_of(), "texts": random_texts(rng), **options}
    refused(message, calibrated, given.pop("model"), given.pop("texts"), **given)


def test_losses_that_are_not_finite_are_refused_on_all_ranks(rng, tmp_path):
    texts = random_texts(rng)
    texts[0][30] = VOCAB - 1
    models = [model_of() for _ in range(2)]
    for model in models:
        with torch.no_grad():
            model.get_input_embeddings().weight[VOCAB - 1] = torch.nan

    def measure(ring):
        told = r"calibrate: \d+ of \d+ losses of LlamaForCausalLM .* are infinite or NaN: use"
        refused(told, calibrated, models[ring.rank], texts, ring=ring, folder=tmp_path / "measured")

    run_simulated(measure, 2)
    assert not list((tmp_path / "measured").glob("changes-*"))


def test_ranks_that_differ_are_refused(rng):
    texts = random_texts(rng)
    models = [model_of() for _ in range(2)]
    for changes in ({"budget": 0.3}, {"texts": random_texts(rng)}, {"seed": 3}):

        def call(ring, changes=changes):
            own = {"texts": texts, **(changes if ring.rank else {})}
            told = f"the ranks of the ring disagree on {next(iter(changes))}"
            refused(told, calibrated, models[ring.rank], own.pop("texts"), ring=ring, **own)

        run_simulated(call, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, r"a pattern for each layer with scores, \[0, 1\], got patterns for \[\]"),
        ({"layers": {"0": "exact"}}, r"scores, \[0, 1\], got patterns for \[0\]"),
        ({"num_hidden_layers": 1}, r"expected layers from 0 to 0, got \[0, 1\]"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 65536, got 1000000000000"),
        ({"seq_len": float("inf")}, "seq_len must be an integer of at least 1, got inf"),
        ({"budget": float("inf")}, "expected a finite number, got inf"),
        ({"budget_of": "time"}, "budget_of must be one of .*, got 'time'"),
        ({"retrieval": 10**400}, "expected a finite number, got 1000"),
        ({"scores": {"0": [[0.0], [float("nan")]], "1": [[0.0], [0.0]]}}, "expected a finite number, got nan"),
        ({"scores": {"0": [[0.0]] * 3, "1": [[0.0]] * 2}}, "is for 2 key/value heads, and layer 0 has 3"),
        ({"menu": ["pyramid:8,40000"]}, "levels must be at most 63"),
        ({"layers": {"0": "kv0-99999999999=exact", "1": "exact"}}, "at most 65536 key/value heads"),
        ({"layers": {"1" * 5000: "exact"}}, "Exceeds the limit"),
        ('{"format": 1, "layers": 3}', "expected a calibration"),
        ("budget", r"\.json is not a JSON file"),
        ("[" * 100000, r"\.json is not a JSON file"),
        ('{"seed": ' + "1" * 5000 + "}", r"\.json is not a JSON file"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_file_with_wrong_numbers_or_layers_or_no_calibration_is_refused(change, message, tmp_path):
    file = tmp_path / "calibration.json"
    save_calibration(file, {0: "kv0=exact;kv1=window:8", 1: "exact"})
    whole = isinstance(change, str)
    file.write_text(change if whole else json.dumps(json.loads(file.read_text()) | change))
    begin = "" if whole else "expected a calibration that Calibration.to_dict wrote: .*"
    refused(begin + message, ra.Calibration.load, file)


def test_a_file_is_replaced_whole_or_left_alone(tmp_path):
    """Also if writing it fails."""

    def fill_the_disk(part):
        part.write_text("ne")
        assert (tmp_path / "a").read_text("utf-8") == "new €" and part.parent == tmp_path
        raise OSError("the disk is full")

    for text in ("old", "new €"):
        write_whole(tmp_path / "a", text)
    with pytest.raises(OSError, match="full"), whole_file(tmp_path / "a") as part:
        fill_the_disk(part)
    assert [(path.name, path.read_text("utf-8")) for path in tmp_path.iterdir()] == [("a", "new €")]
