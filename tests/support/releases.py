"""Which releases of other libraries are installed: what came with a later one is not tested, and the reason names it."""

import functools
import importlib.metadata

import pytest
from packaging.version import Version
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_ring_attention.compute.private import calls_the_interface
from hf_ring_attention.hf.model.wrappers import cache_argument

version = functools.cache(importlib.metadata.version)  # which reads a file, for hundreds of tests


def at_least(package, release):
    """Whether the installed release of a package is this one or a later one."""
    return Version(version(package)) >= Version(release)


def what_lacks(model_type):
    """What Transformers lacks of a model type: the type, or calls of the interface; None for nothing."""
    release = f"Transformers {version('transformers')}"
    if model_type not in CONFIG_MAPPING:
        return f"{release} lacks the model type {model_type}"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    if model_class is not None and not calls_the_interface(model_class):
        return f"{model_class.__name__} of {release} does not call the attention interface"
    return None


def with_names_of_this_release(code):
    """A snippet that gives a cache to `generate` by its new name, as the installed release calls it."""
    (name,) = cache_argument(None)
    return code.replace("cache=cache", f"{name}=cache")


def skip_without(model_type):
    """Skips a test if Transformers lacks the model type, or the type does not call the attention interface."""
    lack = what_lacks(model_type)
    if lack is not None:
        pytest.skip(lack)
