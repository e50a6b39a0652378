"""Every kind of adapter of PEFT on a tiny Llama: a ring of two compared with stock attention on one process."""

import tempfile
import warnings
from functools import partial

import peft
import torch
from peft import LoraConfig, PeftMixedModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tests.support.probe import batch
from tests.support.ranks import on_ranks
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, distance, gradients_distance

TASK = {"task_type": "CAUSAL_LM"}
TARGETS = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}
PROMPTS = {"num_virtual_tokens": 3}
#: The settings of kinds that need others than `TARGETS`.
SETTINGS = {
    "ADALORA": {**TARGETS, "total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
    "C3A": {**TARGETS, "block_size": 8},
    "CARTRIDGE": PROMPTS,
    "CPT": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]},
    "FOURIERFT": {**TARGETS, "n_frequency": 50},
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "MISS": {**TARGETS, "r": 8},
    "MULTITASK_PROMPT_TUNING": {**PROMPTS, "num_tasks": 2},
    "POLY": {**TARGETS, "n_tasks": 2},
    "PREFIX_TUNING": PROMPTS,
    "PROMPT_TUNING": PROMPTS,
    "P_TUNING": {**PROMPTS, "encoder_hidden_size": 16},
    "ROAD": {**TARGETS, "group_size": 8},
    "SHADOW": {},
    "SHIRA": {**TARGETS, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [4, 9, 17], "target_modules": ["embed_tokens"]},
    "VBLORA": {**TARGETS, "vector_length": 8, "num_vectors": 16},
    "WAVEFT": {**TARGETS, "n_frequency": 50},
}
#: What a call gets beside its rows.
_TASKS = {"task_ids": torch.tensor([0, 1])}
ARGUMENTS = {
    "POLY": _TASKS,
    "MULTITASK_PROMPT_TUNING": _TASKS,
    "LoRA, adapter_names": {"adapter_names": ["default", "other"]},
}
NOT_INSTALLED = {"ADAMSS": "needs scikit-learn"}
#: Settings of LoRA that change what a layer computes.
VARIANTS = {
    "activated LoRA": {"alora_invocation_tokens": batch("right")[0]["input_ids"][0, 9:11].tolist()},
    "BD-LoRA": {"use_bdlora": peft.BdLoraConfig(["q_proj", "v_proj"], ["o_proj", "down_proj"], 2)},
    "DoRA": {"use_dora": True},
    "KaSA": {"kasa_config": peft.KasaConfig()},
    "layer_replication": {"layer_replication": [(0, 2), (1, 2)]},
    "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "MonteCLoRA": {"monteclora_config": peft.MontecloraConfig()},
    "rsLoRA": {"use_rslora": True},
    "target_parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "trainable_token_indices": {"trainable_token_indices": [4, 9]},
    "VeLoRA": {"velora_config": peft.VeloraConfig(num_groups=4)},
}


def _lora(**changes):
    return LoraConfig(**TASK, **{**TARGETS, "r": 4, **changes})


def _two_adapters(active, model_class=get_peft_model, other=_lora):
    model = model_class(tiny_model("llama", "eager"), _lora())
    model.add_adapter("other", other())
    (model.base_model if active else model).set_adapter(active or "default")
    return model


def _saved(make):
    """make(model, paths) of a model and two saved adapters."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{number}" for number in range(2)]
        for path in paths:
            _drawn(get_peft_model(tiny_model("llama", "eager"), _lora())).save_pretrained(path)
        return make(tiny_model("llama", "eager"), paths)


def _mixture(model, paths):
    model.config.use_cache = False
    return get_peft_model(model, peft.XLoraConfig(**TASK, hidden_size=32, adapters=dict(zip("01", paths))))


def _arrow(model, paths):
    from peft.tuners.lora.arrow import create_arrow_model

    return create_arrow_model(model, paths, peft.ArrowConfig(top_k=1))


def _of_type(name):
    config = PEFT_TYPE_TO_CONFIG_MAPPING[name]
    base = tiny_model("llama", "eager")
    if name == "PSOFT":  # It decomposes no weights in float64.
        return get_peft_model(base.bfloat16(), config(**TASK, **TARGETS, r=8)).double()
    return get_peft_model(base, config(**TASK, **SETTINGS.get(name, TARGETS)))


#: Functions that make a model, by the kinds of adapters.
KINDS = {getattr(name, "name", name): partial(_of_type, name) for name in PEFT_TYPE_TO_CONFIG_MAPPING}
KINDS |= {
    f"LoRA, {name}": partial(lambda changes: get_peft_model(tiny_model("llama", "eager"), _lora(**changes)), changes)
    for name, changes in VARIANTS.items()
}
KINDS |= {
    "LoRA, adapter_names": partial(_two_adapters, None),
    "LoRA, two adapters at once": partial(_two_adapters, ["default", "other"]),
    "LoRA, Arrow": partial(_saved, _arrow),
    "XLORA": partial(_saved, _mixture),
    "PeftMixedModel of LoRA and LoHa": partial(
        _two_adapters, ["default", "other"], PeftMixedModel, partial(peft.LoHaConfig, **TASK, **TARGETS)
    ),
}


def _drawn(model):
    """The model, with adapters that change what it computes."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.eval()


def _results(model, kind):
    """Loss, logits of the tokens that count, and gradients."""
    inputs, labels = batch("right")
    del inputs["position_ids"]  # PEFT counts tokens behind a prompt.
    out = model(**inputs, labels=labels, **ARGUMENTS.get(kind, {}))
    if out.loss.requires_grad:
        out.loss.backward()
    logits = torch.stack([out.logits])[0, :, -labels.shape[1] :].detach()[
        labels != -100
    ]  # formed by all ranks together
    return out.loss.detach(), logits, {n: x.grad for n, x in model.named_parameters() if x.grad is not None}


def _made(kind):
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return _drawn(KINDS[kind]())


def survey_adapter(kind):
    """ "equal", or why the kind is refused over a ring; raises AssertionError for other numbers than stock's."""
    if kind in NOT_INSTALLED:
        return f"not run: {NOT_INSTALLED[kind]}"
    expected = _results(_made(kind), kind)

    def work(ring, model):
        loss, logits, gradients = _results(model, kind)
        return loss, logits, {n: torch.stack(ring.gather(x)).mean(0) for n, x in gradients.items()}

    models = [_made(kind) for _ in range(2)]
    try:
        found = on_ranks(work, iter(models).__next__)
    except (ValueError, NotImplementedError) as refused:
        return f"refused: {refused}"
    for loss, logits, gradients in found:
        errors = distance(loss, expected[0]), distance(logits, expected[1]), gradients_distance(gradients, expected[2])
        assert max(errors) <= EXACT, f"{kind}: {errors}"
        assert expected[2].keys() == gradients.keys()
    return "equal"
