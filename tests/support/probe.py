"""The survey of model types, which tests of single features use too."""

from hf_ring_attention.tools.survey.precision import distance as distance
from hf_ring_attention.tools.survey.precision import largest as largest
from hf_ring_attention.tools.survey.probe import *  # noqa: F403
