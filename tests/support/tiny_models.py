"""The tiny models of the survey of model types, which most tests of models use."""

import torch

from hf_ring_attention.cli.checks.tiny_models import *  # noqa: F403


def with_large_weights(model):
    """The model with the same weights at every call, so large that attention is far from uniform; a wrong key then shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator)
    return model
