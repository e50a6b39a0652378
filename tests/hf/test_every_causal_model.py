"""Every line of the table of supported models, run again: equal to eager attention, or refused for the listed reason."""

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PretrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_ring_attention as ra
from hf_ring_attention.hf.model.models import release_of_table
from hf_ring_attention.hf.model.support import LAYER_TYPES, check_config
from hf_ring_attention.hf.model.types import MIXER_LAYERS
from hf_ring_attention.hf.model.wrappers import cache_argument, takes

from ..support.probe import batch, survey
from ..support.tiny_models import CAUSAL_TYPES, NOT_BUILT, SEEING_TYPES, VOCAB, tiny_config, tiny_model
from ..support.tolerance import EXACT, distance
from ..survey import models_page
from .alike import refused

KNOWN = {model.model_type: model for model in ra.supported_models()}


@pytest.mark.drawn(40)
@pytest.mark.parametrize("model_type", sorted((*CAUSAL_TYPES, *SEEING_TYPES)))
def test_a_type(model_type):
    """`survey` fails if outputs or gradients differ from eager attention.

    The table is made with one release of Transformers; another release may refuse a type that this release supports.
    """
    found = survey(model_type)
    if transformers.__version__ == release_of_table():
        assert found == KNOWN[model_type]
    else:
        assert "'eager'" in found.reason or found.ring or found.status == "untested" or "ring=None" in found.reason


#: Pattern of all layers, and by layer, if layers may share keys.
PATTERNS = {"all": ["window:5+2"], "layers": ["window:5+2", "window:3+1", "window:7", "pyramid:3,2,2,2"]}
TEXT = 13
#: How far the steps of some mixers are from a whole row in Transformers itself.
STEPS = {"nemotron_h": 0.02, "zamba2": 0.02}


def ids_of(length, seed=1):
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def places(model, start, stop):
    numbers = torch.arange(start, stop).expand(2, -1)
    return {"position_ids": numbers} if takes(model, "position_ids") else {}


def whole(model, rows):
    return model(rows, use_cache=False, **places(model, 0, rows.shape[1])).logits


def generated(model):
    """The logits of `generate` by default, and those of one pass over the row."""
    ways = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}
    ids = ids_of(TEXT)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, **ways)
    yield torch.stack(output.logits, 1), whole(model, output.sequences[:, :-1])[:, TEXT - 1 :]


def by_hand(model):
    """A text in pieces, two questions to it, and a third text behind it; between pieces, the cache is copied or pickled."""
    cache = ra.PatternCache(model)
    for seed, steps in ((1, (9, 1, 3)), (2, (4, 1, 1, 3)), (3, (2, 1)), (4, (1, 3))):
        first = cache.get_seq_length()
        rows = torch.cat([ids_of(TEXT)[:, :first], ids_of(sum(steps), seed)], 1)
        expected = whole(model, rows)
        if seed in (2, 3):
            cache.activate_past_recording()
        for count in steps:
            start, stop = cache.get_seq_length(), cache.get_seq_length() + count
            arguments = {"use_cache": True, **places(model, start, stop), **cache_argument(cache)}
            yield model(rows[:, start:stop], **arguments).logits, expected[:, start:stop]
            cache = pickle.loads(pickle.dumps(cache)) if count == 1 else copy.deepcopy([cache.layers, cache])[1]
        if seed in (2, 3):
            cache.crop(TEXT - cache.get_seq_length())


@pytest.mark.drawn(80)
@pytest.mark.parametrize("way", [generated, by_hand])
@pytest.mark.parametrize("patterns", PATTERNS)
@pytest.mark.parametrize("model_type", [x for x in CAUSAL_TYPES if x not in NOT_BUILT])
@torch.no_grad()
def test_caches_of_a_type(model_type, patterns, way, record_property):
    """With a cache as without one, or refused before the prompt is computed."""
    model, outcome, done = tiny_model(model_type, "eager"), "equal", []
    model.register_forward_hook(lambda *_: done.append(True))
    texts = PATTERNS[patterns]
    layers = range(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    try:
        ra.patch_model(model, [texts[n % 4] for n in layers] if patterns == "layers" else texts[0])
        if way is generated and not model.can_generate():
            pytest.skip("it does not generate")
        if way is generated and model_type.startswith("dots3_note"):
            pytest.skip(
                "it chooses other keys of a longer row in Transformers; tests/hf/test_indexed.py compares the texts"
            )
        for found, expected in way(model):
            assert distance(found, expected) <= STEPS.get(model_type, EXACT)
    except (ValueError, NotImplementedError) as error:
        if done:
            raise
        outcome = re.sub(r"layers? [\d, and]+ (is|are) |^\w+: |^PatternCache: \w+: ", "", str(error))[:60]
    record_property("outcome", outcome)


def test_the_table():
    counts = {status: sum(model.status == status for model in KNOWN.values()) for status in ("supported", "untested")}
    assert counts["supported"] >= 120
    assert counts["untested"] == len(NOT_BUILT)
    assert models_page(ra.supported_models(), release_of_table()) == (
        Path(ra.__file__).parent / "hf" / "MODELS.md"
    ).read_text(encoding="utf-8"), "run `make models`"


def test_reasons_name_the_class_and_what_works():
    for model in KNOWN.values():
        if model.status == "refused":
            assert re.search(r"\w+(For\w+|Model|LMHeadModel|WithLMHead\w*)\b", model.reason), model
            remedy = "leave this package out" if "no attention" in model.reason else "'eager'"
            assert remedy in model.reason and len(model.reason) > 80, model
        elif model.status == "supported" and not model.ring:
            assert model.model_class in model.reason and "ring=None" in model.reason, model


def test_supported_types_have_all_kinds_of_layers_that_their_configs_know():
    """The default config of a type may lack a kind that released models have, and that is refused."""
    for model in (x for x in KNOWN.values() if x.status == "supported" and x.model_type in CONFIG_MAPPING):
        config = tiny_config(model.model_type).get_text_config()
        source = inspect.getsource(inspect.getmodule(type(config)))
        kinds = {*ALLOWED_LAYER_TYPES} - {
            *LAYER_TYPES,
            *MIXER_LAYERS,
            "sparse",
            "dense",
            "moe",
        }  # "sparse" and "moe" are MLPs.
        assert {kind for kind in kinds if f'"{kind}"' in source} <= {*(getattr(config, "layer_types", None) or ())}, (
            model
        )


#: Types that look implementations up in a private table, which lacks "ring_dilated".
OWN_TABLES = {"falcon", "git", "gpt_neo"}


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", [m.model_type for m in KNOWN.values() if m.status == "refused"])
def test_refused_at_the_first_forward_pass_too(model_type):
    """Of a model that only named the implementation."""
    if model_type not in CAUSAL_TYPES:
        pytest.skip(f"Transformers {transformers.__version__} lacks the causal model type {model_type}")
    inputs, _ = batch("plain")
    if model_type in OWN_TABLES:
        refused("ring_dilated", tiny_model, model_type, "ring_dilated", error=KeyError)
    else:
        said, model = r"'eager'|'sdpa'|ring_dilated takes", tiny_model(model_type, "ring_dilated")
        refused(said, model, **inputs, use_cache=False, error=(ValueError, NotImplementedError))


def test_configs_of_other_kinds_of_layers():
    """The config decides, also for classes that Transformers does not know."""

    class Custom(PretrainedConfig):
        model_type = "custom"

    check_config(Custom())
    check_config(Custom(layer_types=["full_attention", "sliding_attention", "chunked_attention"]))
    state, rule = "state from token to token", "a rule that no pattern can express"
    for kind, reason in {"linear_attention": state, "conv": state, "indexed_attention": rule}.items():
        said = rf"Custom: layer 1 is '{kind}', which.*{reason}.*'sdpa'"
        refused(said, check_config, Custom(layer_types=["full_attention", kind]), error=NotImplementedError)
    said = "Custom: its indexer selects keys at run time"  # though one of its class was let through
    refused(said, check_config, Custom(index_topk=8), error=NotImplementedError)
    said = "Custom attends from a decoder to an encoder"
    refused(said, check_config, Custom(add_cross_attention=True), error=NotImplementedError)
