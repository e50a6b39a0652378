"""Layers of multi-token prediction: their losses and gradients by Transformers' layers alone, over rings, saved and loaded."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DynamicCache,
    Trainer,
    TrainingArguments,
    modeling_layers,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.model.config import warn_once
from hf_ring_attention.hf.model.wrappers import cache_argument
from tests.support.stock import over, run_program, settings, texts, word_tokenizer
from tests.support.tiny_models import VOCAB, tiny_model, with_large_weights
from tests.support.tolerance import distance
from tests.support.training import assert_equal_runs, documents, loop, tiny_llama

pytestmark = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this Transformers lacks use_mtp")

#: Types whose checkpoints have such layers, and whose layers ring_dilated computes, with what tiny configs lack; and one more.
CHANGES = {
    "axk1": {}, "bailing_hybrid": {}, "deepseek_v3": {}, "glm4_moe": {}, "kimi_linear": {}, "llama": {}, "mellum": {},
    "mimo_v2_flash": {"mtp_layer_types": ["sliding_attention", "full_attention"]}, "sarvam_mla": {}, "sarvam_moe": {},
    "solar_open": {}, "step3p7": {"sliding_window": 5}, "youtu": {},
}  # fmt: skip
CHANGES = {name: changes for name, changes in CHANGES.items() if name in CONFIG_MAPPING}  # of this Transformers
#: A config of Mellum has at most one such layer.
DEPTHS = dict.fromkeys(CHANGES, 2) | {"mellum": 1}
WEIGHT, LENGTH = 0.3, 23


def made(model_type, pattern=None, depths=None, **changes):
    """A model in training mode, with large weights in its layers of multi-token prediction."""
    model = tiny_model(model_type, "eager", **CHANGES[model_type], **changes)
    torch.manual_seed(4)
    ra.mtp_loss(ra.patch_model(model, pattern), WEIGHT, depths or DEPTHS[model_type])
    with_large_weights(model.mtp.layers)
    return model.train()


def ids(rows=2):
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def batches():
    """Two rows: plain, padded on both sides, and packed; and the documents in each."""
    x, mask = ids(), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5], mask[1, 20:] = 0, 0
    of_padded, of_packed = x.masked_fill(mask == 0, -100), x.clone()
    of_padded[0, 5], of_packed[:, [0, 9]] = -100, -100
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(2, -1)
    return {
        "plain": ({"input_ids": x, "labels": x}, [*x]),
        "padded": ({"input_ids": x, "labels": of_padded, "attention_mask": mask}, [x[0, 5:], x[1, :20]]),
        "packed": (
            {"input_ids": x, "labels": of_packed, "position_ids": positions},
            [part for row in x for part in (row[:9], row[9:])],
        ),
    }


def step(model, batch):
    """The loss, the losses of all depths, and the gradients of one step."""
    out = model(**batch)
    out.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return out.loss.detach(), out.mtp_losses, gradients


def expected_step(model_type, heads, texts_alone):
    """The same by an unpatched model and Transformers' layers with these weights, of each document alone."""
    model = tiny_model(model_type, "eager", **CHANGES[model_type]).train()
    config, depths = model.config.get_text_config(), len(heads)
    config.num_mtp_layers = depths
    for kind in ("layer_types", "mlp_layer_types"):
        if getattr(config, kind, None) and getattr(config, f"mtp_{kind}", None) is None:
            setattr(config, f"mtp_{kind}", [getattr(config, kind)[-1]] * depths)
    mtp = modeling_layers.MtpModel(model, depths)
    mtp.layers.load_state_dict(heads.state_dict())
    sums, counts = [0.0] * (depths + 1), [0] * (depths + 1)
    for text in texts_alone:
        length, hidden = len(text), model.get_decoder()(text[None]).last_hidden_state
        for depth in range(depths + 1):
            if depth:
                positions = torch.arange(depth, length)[None]
                hidden = mtp.forward_layer(depth - 1, hidden[:, :-1], positions, None, input_ids=text[None, depth:])
            logits = model.lm_head(hidden)[0, :-1].float()
            sums[depth] = sums[depth] + F.cross_entropy(logits, text[depth + 1 :], reduction="sum")
            counts[depth] += length - depth - 1
    main, *losses = (x / count for x, count in zip(sums, counts, strict=True))
    loss = main + WEIGHT * sum(losses) / depths
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return (
        loss.detach(),
        torch.stack(losses).detach(),
        gradients | {f"mtp.layers.{name}": x.grad for name, x in mtp.layers.named_parameters() if x.grad is not None},
    )


def assert_step(found, expected, bound=1e-3):
    """Losses are float32; gradients through states of linear attention, in chunks of other tokens, have the largest errors."""
    assert found[2].keys() == expected[2].keys()
    for x, other in (*zip(found[:2], expected[:2], strict=True), *((x, expected[2][k]) for k, x in found[2].items())):
        assert distance(x, other) <= bound


@pytest.mark.drawn(3)
@pytest.mark.parametrize("rows", batches())
@pytest.mark.parametrize("model_type", CHANGES)
def test_losses_are_those_of_each_document_in_transformers(model_type, rows):
    batch, texts_alone = batches()[rows]
    model = made(model_type)
    assert_step(step(model, batch), expected_step(model_type, model.mtp.layers, texts_alone))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("pattern", [None, "window:4+1"])
@pytest.mark.parametrize("rows", batches())
@pytest.mark.parametrize("model_type", CHANGES)
def test_rings_compute_what_one_process_does(model_type, rows, pattern):
    batch, _ = batches()[rows]
    expected = step(made(model_type, pattern), batch)
    if pattern is not None:
        assert distance(expected[1], step(made(model_type), batch)[1]) > 1e-3
    for ranks in (1, 2, 3):
        models = [made(model_type, pattern) for _ in range(ranks)]  # Simulated ranks share a generator.
        found = ra.run_simulated(
            lambda ring, models=models: step(ra.patch_model(models[ring.rank], ring=ring), batch), ranks
        )
        gradients = {name: sum(of_rank[2][name] for of_rank in found) / ranks for name in found[0][2]}
        for loss, losses, _ in found:
            assert_step((loss, losses, gradients), expected)


def test_patterns_by_layer_leave_them_exact():
    """As in drafts: their layers have numbers from 0 too, but others."""
    batch, _ = batches()["plain"]
    exact, by_layer = made("llama"), made("llama", ["window:4+1", "window:4+1"])
    hidden = torch.randn(2, LENGTH, 32)
    for model in (exact, by_layer):
        model.model.register_forward_hook(lambda *call: setattr(call[-1], "last_hidden_state", hidden), prepend=True)
    assert distance(step(by_layer, batch)[1], step(exact, batch)[1]) <= 1e-6


def test_rows_without_a_token_to_predict_have_a_loss_of_zero():
    """As the mean over tokens, and not NaN."""
    model, short = made("llama"), ids()[:, :3]
    out = model(short, labels=short)
    assert out.mtp_losses[0] > 0 and out.mtp_losses[1] == 0 and torch.isfinite(out.loss)
    out.loss.backward()


def test_labels_are_ignored_by_another_number():
    batch, _ = batches()["padded"]
    losses = made("llama")(**batch).mtp_losses
    other = batch["labels"].masked_fill(batch["labels"] == -100, 0)
    assert distance(made("llama")(**{**batch, "labels": other, "ignore_index": 0}).mtp_losses, losses) <= 1e-5


def test_rope_that_depends_on_the_length_of_a_document(in_float64):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changes = {"rope_parameters": rope, "max_position_embeddings": 8}
    batch, _ = batches()["packed"]
    expected, models = step(made("llama", **changes), batch), [made("llama", **changes) for _ in range(2)]
    for _, losses, _ in ra.run_simulated(lambda ring: step(ra.patch_model(models[ring.rank], ring=ring), batch), 2):
        assert distance(losses, expected[1]) <= 1e-5


def test_layers_that_do_not_learn_are_frozen():
    model = ra.mtp_loss(ra.patch_model(tiny_llama(None)), 0, 1)
    assert not any(x.requires_grad for x in model.mtp.parameters())
    assert not hasattr(model.train()(ids(), labels=ids()), "mtp_losses")


# ---- programs


def in_loop(rank, ring_size, **ways):
    ra_model = ra.patch_model(tiny_llama(None))
    torch.manual_seed(4)
    return loop(rank, rows=documents(6, 9, 30, 2), ring_size=ring_size, model=ra.mtp_loss(ra_model, WEIGHT, 2), **ways)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_checkpointed_layers_train_over_a_ring(wrap, programs):
    expected = programs.run(in_loop, 1, 1)[0]
    for found in programs.run(partial(in_loop, wrap=wrap, checkpointing=True), 2, 2):
        assert_equal_runs(found, expected, wrap, {"losses": 1e-5, "norms": 1e-4, "parameters": 1e-4})


def trained(folder, ring_size, steps, resume=None):
    """A Trainer's log, its weights, and the folder that it saved."""
    torch.manual_seed(4)
    model = ra.mtp_loss(ra.patch_model(tiny_llama(None)), WEIGHT, 2)
    tokenizer = word_tokenizer()
    rows = texts(8, "text").map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])
    kind, ring = over(Trainer, ring_size)
    args = TrainingArguments(**settings(str(folder), steps, save_strategy="steps", save_steps=2, eval_strategy="steps"))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = kind(model, args, train_dataset=rows, eval_dataset=rows.select(range(3)), data_collator=collator, **ring)
    trainer.train(resume_from_checkpoint=resume)
    losses = [x[name] for x in trainer.state.log_history for name in ("loss", "eval_loss") if name in x]
    return losses, {name: x.detach().clone() for name, x in model.named_parameters()}


def test_a_trainer_saves_and_resumes_them(tmp_path, programs):
    """Evaluation has the loss of next tokens alone."""
    losses, weights = run_program(0, trained, tmp_path / "one", 1, 4)
    for found, own in programs.run(run_program, 2, trained, tmp_path / "ring", 2, 4):
        assert found == pytest.approx(losses, rel=1e-4)
        assert all(distance(x, weights[name]) <= 1e-4 for name, x in own.items())
    again, own = run_program(0, trained, tmp_path / "again", 1, 4, str(tmp_path / "one" / "checkpoint-2"))
    assert again[-1] == pytest.approx(losses[-1], rel=1e-6)
    assert all(torch.equal(x, weights[name]) for name, x in own.items())
    loaded = ra.patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-4", dtype="auto"))
    for name, x in ra.mtp_loss(loaded).named_parameters():
        assert torch.equal(x, weights[name]), name


# ---- checkpoints


@pytest.mark.parametrize(
    ("model_type", "depths", "changes", "name"),
    [
        ("mellum", 1, {}, "mtp.layers.0.eh_proj.weight"),
        ("mimo_v2_flash", 2, {}, "model.mtp.layers.1.eh_proj.weight"),
        ("glm4_moe", 1, {"num_hidden_layers": 46}, "model.layers.46.shared_head.norm.weight"),
    ],
)
def test_transformers_drafts_with_saved_layers(model_type, depths, changes, name, tmp_path):
    """A program that knows nothing of this package: its tokens stay the same."""
    model = made(model_type, depths=depths, **changes)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert name in file.keys()  # noqa: SIM118
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    drafting, own = modeling_layers.MtpModel.from_pretrained(stock), dict(model.mtp.named_parameters())
    assert own and all(torch.equal(x, drafting.get_parameter(name)) for name, x in own.items())
    greedy = partial(stock.generate, ids(1), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(greedy(use_mtp=True), greedy())


@pytest.mark.parametrize("model_type", ["step3p7", "youtu"])
def test_saved_layers_are_loaded_under_other_names(model_type, tmp_path):
    """Transformers changes names when it saves; and it finds no such layers of some types."""
    model = made(model_type)
    model.save_pretrained(tmp_path)
    loaded = dict(
        ra.mtp_loss(ra.patch_model(type(model).from_pretrained(tmp_path, dtype="auto"))).mtp.named_parameters()
    )
    assert all(torch.equal(x, loaded[name]) for name, x in model.mtp.named_parameters())


def passes(folder, **ways):
    """How often a saved model runs to generate 40 tokens."""
    model, counted = ra.patch_model(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()), []
    ra.mtp_loss(model).register_forward_hook(lambda *_: counted.append(1))
    model.generate(torch.arange(5)[None], max_new_tokens=40, do_sample=False, pad_token_id=0, **ways)
    return len(counted)


def test_training_makes_drafts_right(tmp_path):
    """Of rows that count, where all later tokens follow from each; without training, most drafts are wrong."""
    counts = []
    for weight in (0.0, 0.3):
        torch.manual_seed(0)
        model = ra.mtp_loss(ra.patch_model(tiny_model("glm4_moe", "eager")), weight, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(120):
            rows = (torch.randint(VOCAB, (4, 1)) + torch.arange(24)) % VOCAB
            model.train()(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(tmp_path)
        counts.append(passes(tmp_path, use_mtp=True))
    assert passes(tmp_path) == 40 and counts[0] > 34 and counts[1] < 26, counts


# ---- refusals


def test_what_is_refused(caplog):
    model, x = tiny_llama(None), ids()
    adapted = get_peft_model(ra.patch_model(tiny_llama(None)), LoraConfig(target_modules=["q_proj"]))
    switched = ra.mtp_loss(ra.patch_model(tiny_llama(None)), depths=1)
    switched.set_attn_implementation("sdpa")
    states = tiny_model("kimi_linear", "eager", mtp_layer_types=["linear_attention"])
    refusals = [
        (lambda: ra.mtp_loss(tiny_model("llama", "eager"), depths=1), ValueError, "after ra.patch_model"),
        (lambda: ra.mtp_loss(model.model, depths=1), ValueError, "takes a causal model"),
        (
            lambda: ra.mtp_loss(ra.patch_model(tiny_model("phi", "eager")), depths=1),
            NotImplementedError,
            "no such layers",
        ),
        (lambda: ra.mtp_loss(ra.patch_model(tiny_llama(None))), ValueError, "pass depths=1 for new ones"),
        (lambda: ra.mtp_loss(ra.patch_model(tiny_llama(None)), "0.1", 1), ValueError, "weight must be a number"),
        (lambda: ra.mtp_loss(adapted, depths=1), ValueError, r"call it first, with modules_to_save=\['mtp'\]"),
        (lambda: switched.train()(x, labels=x), NotImplementedError, "needs ring_dilated, got 'sdpa'"),
        (lambda: ra.mtp_loss(ra.mtp_loss(model, depths=1), depths=1), ValueError, "takes a causal model once"),
        (lambda: ra.mtp_loss(ra.patch_model(tiny_llama(None)), depths=0), ValueError, "depths"),
        (
            lambda: ra.mtp_loss(ra.patch_model(states), depths=1),
            NotImplementedError,
            "pass states",
        ),
        (lambda: model.train()(inputs_embeds=model.model.embed_tokens(x), labels=x), ValueError, "no input_ids"),
        (lambda: model.train()(x, labels=x, pixel_values=x), NotImplementedError, "images or sound"),
        (lambda: model.train()(x, labels=x, fused_lm_head=True), NotImplementedError, "TRL and distillation compute"),
        (
            lambda: model.train()(x, labels=x, **cache_argument(DynamicCache())),
            NotImplementedError,
            "no graphs, caches",
        ),
    ]
    ra.patch_model(model)
    warn_once.cache_clear()
    for call, kind, text in refusals:
        with pytest.raises(kind, match=text):
            call()
    assert model.train()(x, shift_labels=x).loss is None
    assert "mtp_loss gave LlamaForCausalLM learn nothing: it was called without labels" in caplog.text
    model.mtp.requires_grad_(False)
    model(x, labels=x)
    assert "learn nothing: they are frozen (with PEFT: modules_to_save=['mtp'])" in caplog.text
