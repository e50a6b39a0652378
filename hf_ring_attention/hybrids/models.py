"""The mixers of hybrid models, as `patch_model` asks for them."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..hf.model.types import MIXER_LAYERS, MIXERS
from ..hf.model.wrappers import decoder_of
from .mixers import attach, check_parameters


def mixers_of(model: nn.Module, config: PretrainedConfig) -> list[tuple[str, nn.Module]]:
    """Returns the mixers of a text model with their paths."""
    names = MIXERS.get(config.model_type, ())
    # FSDP 2 makes a new class for each module that it shards.
    return [(path, x) for path, x in model.named_modules() if any(kind.__name__ in names for kind in type(x).__mro__)]


def checked_mixers(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the paths of a model's mixers in its text model; refuses releases of Transformers with other mixers."""
    config = model.config.get_text_config()
    mixers = mixers_of(decoder_of(model), config)
    types = getattr(config, "layer_types", None) or MIXER_LAYERS
    if not mixers and config.model_type in MIXERS and {*types} & {*MIXER_LAYERS}:
        raise NotImplementedError(
            f"{type(model).__name__} has no module of the class {MIXERS[config.model_type][0]}, whose name this release of "
            f"Transformers may have changed: use 'sdpa' or 'eager', or a tested release"
        )
    for path, module in mixers:
        check_parameters(path, module)
    return tuple(path for path, _ in mixers)


def attach_mixers(model: PreTrainedModel) -> None:
    """Makes the mixers of a model keep documents apart, and pass their states over the model's ring."""
    config = model.config.get_text_config()
    for _, module in mixers_of(decoder_of(model), config):
        attach(module, config)
