"""The tiny models of the survey of model types, which most tests of models use."""

from hf_ring_attention.tools.survey.tiny_models import *  # noqa: F403
