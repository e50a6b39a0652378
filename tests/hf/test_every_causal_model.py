"""Every line of the table of supported models, run again: equal to eager attention, or refused for the listed reason."""

import inspect
import re
from pathlib import Path

import pytest
import transformers
from transformers import PretrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

import hf_ring_attention as ra
from hf_ring_attention.hf.model_types import MIXER_LAYERS
from hf_ring_attention.hf.models import release_of_table
from hf_ring_attention.hf.support import LAYER_TYPES, check_config

from ..support.probe import batch, survey
from ..support.tiny_models import CAUSAL_TYPES, NOT_BUILT, tiny_config, tiny_model
from ..survey import models_page

KNOWN = {model.model_type: model for model in ra.supported_models()}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_a_type(model_type):
    """`survey` fails where outputs or gradients differ from eager attention.

    The table is made with one release of Transformers; another release may refuse a type that this release supports.
    """
    found = survey(model_type)
    if transformers.__version__ == release_of_table():
        assert found == KNOWN[model_type]
    else:
        assert "'eager'" in found.reason or found.ring or found.status == "untested" or "ring=None" in found.reason


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
            assert "'eager'" in model.reason and len(model.reason) > 80, model
        elif model.status == "supported" and not model.ring:
            assert model.model_class in model.reason and "ring=None" in model.reason, model


def test_supported_types_have_all_kinds_of_layers_that_their_configs_know():
    """The default config of a type may lack a kind that released models have, and that is refused."""
    for model in (x for x in KNOWN.values() if x.status == "supported"):
        config = tiny_config(model.model_type).get_text_config()
        source = inspect.getsource(inspect.getmodule(type(config)))
        kinds = {*ALLOWED_LAYER_TYPES} - {*LAYER_TYPES, *MIXER_LAYERS, "sparse", "dense"}  # "sparse" MLPs have experts.
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
        with pytest.raises(KeyError, match="ring_dilated"):
            tiny_model(model_type, "ring_dilated")
    else:
        model = tiny_model(model_type, "ring_dilated")
        with pytest.raises((ValueError, NotImplementedError), match=r"'eager'|'sdpa'|ring_dilated takes"):
            model(**inputs, use_cache=False)


def test_configs_of_other_kinds_of_layers():
    """The config decides, also for classes that Transformers does not know."""

    class Custom(PretrainedConfig):
        model_type = "custom"

    check_config(Custom(layer_types=["full_attention", "sliding_attention", "chunked_attention"]))
    for kind, reason in (
        ("linear_attention", "state from token to token"),
        ("conv", "state from token to token"),
        ("indexed_attention", "a rule of its own"),
    ):
        with pytest.raises(NotImplementedError, match=rf"Custom: layer 1 is of type '{kind}'.*{reason}.*'sdpa'"):
            check_config(Custom(layer_types=["full_attention", kind]))
    check_config(Custom())
    with pytest.raises(NotImplementedError, match="Custom selects keys by an indexer"):
        check_config(Custom(index_topk=8))  # though one of its class was let through
    with pytest.raises(NotImplementedError, match="Custom attends from a decoder to an encoder"):
        check_config(Custom(add_cross_attention=True))
