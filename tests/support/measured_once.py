"""Estimates of one config that measure its layers once, which is most of their time: `@measured_once` above a test."""

from dataclasses import replace
from unittest.mock import patch

from hf_ring_attention.cost.models import config_of
from hf_ring_attention.cost.shape import shape_of_model

_SHAPES, _LINES = {}, {}


def _shape(model, pattern=None):
    """`shape_of_model`, whose measurements are those of any pattern with as many layers to measure."""
    config = config_of(model).to_json_string()
    if (config, str(pattern)) not in _SHAPES:
        shape = shape_of_model(model, pattern)
        lines = _LINES.setdefault((config, len(shape.stack)), {})
        _SHAPES[config, str(pattern)] = replace(shape, lines=lines)
    return _SHAPES[config, str(pattern)]


measured_once = patch("hf_ring_attention.cost.estimate.shape_of_model", _shape)


def measured_anew():
    """Contexts in which measurements are apart from those outside."""
    return patch.dict(_SHAPES, clear=True), patch.dict(_LINES, clear=True)
