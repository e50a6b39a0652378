"""Kernels of fla, mamba-ssm and causal-conv1d, if they are installed: stand-ins with their signatures and their limits.

The decorator of Transformers finds them in packages that are put in place here. Each calls the function of Transformers
that it replaces, and counts its calls.
"""

import inspect
import itertools
import sys
import types

import pytest
import torch
from transformers.integrations import hub_kernels

import hf_ring_attention as ra
from hf_ring_attention.hf.forward_pass import running
from hf_ring_attention.hybrids.models import mixers_of

from ..support.neighbours import check
from ..support.probe import alone, batch, logits_and_gradients, over_ring
from ..support.ranks import on_ranks
from ..support.tiny_models import tiny_model

# ---- the signatures of fla 0.6, mamba-ssm 2.2 and causal-conv1d 1.7


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None
): ...  # fmt: skip


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **kwargs,
): ...  # fmt: skip


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
): ...  # fmt: skip


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
): ...  # fmt: skip


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
): ...  # fmt: skip


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
): ...  # fmt: skip


#: The module and the signature of each kernel, by the name of the function of Transformers.
KERNELS = {
    "causal_conv1d_fn": ("causal_conv1d", causal_conv1d_fn),
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", chunk_gated_delta_rule),
    "chunk_kimi_delta_attention": ("fla.ops.kda", chunk_kda),
    "mamba2_chunk_scan": ("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined),
    "mamba_selective_scan": ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn),
}
#: The names of parameters in Transformers, if they are others.
OURS = {"x": "hidden_states", "u": "hidden_states", "delta": "dt", "q": "query", "k": "key", "v": "value"}


class WithoutGradient(torch.autograd.Function):
    """A state whose gradient the kernel does not compute, although autograd may ask for it."""

    @staticmethod
    def forward(ctx, state):
        return state.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad)


def checked(name, given):
    """Refuses the layouts in memory, dtypes and shapes that the real kernel refuses."""
    if name == "causal_conv1d_fn":
        assert 1 in given["x"].stride()[1:] and 2 <= given["weight"].shape[1] <= 4 and given["weight"].dim() == 2
        assert given["activation"] in (None, "silu", "swish")
    elif name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"):
        assert given["q"].dtype == given["k"].dtype == given["v"].dtype and given["k"].shape[-1] <= 256
        state, heads = given["initial_state"], given["v"].shape[2]
        assert heads % given["k"].shape[2] == 0 and given["beta"].shape == given["v"].shape[:3]
        if state is not None:
            assert state.is_contiguous() and state.shape[2:] == (given["k"].shape[-1], given["v"].shape[-1])
    elif name == "mamba_selective_scan":
        assert given["delta"].shape == given["u"].shape and given["B"].shape == given["C"].shape
        assert given["B"].shape[-1] == given["u"].shape[-1]


def stand_in(name, kernel, original, calls):
    """A function with the signature of a kernel, which counts its calls and computes by the original."""
    signature, known = inspect.signature(kernel), inspect.signature(original).parameters

    def compute(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        assert not given.pop("kwargs", None), "kernels take named arguments only"
        calls.append(name)
        checked(name, given)
        assert "split" not in name or running().chain is None, "it joins several steps, between which states pass"
        out = original(**{OURS.get(x, x): y for x, y in given.items() if OURS.get(x, x) in known})
        if name == "mamba_selective_scan" and given["return_last_state"]:
            return out[0], WithoutGradient.apply(out[1])
        return out

    compute.__signature__ = signature
    return compute


def packages(path):
    """The names of a module and of all packages around it, from the outside in."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


@pytest.fixture
def kernels(monkeypatch):
    """A function that installs stand-ins for the kernels of a model, and returns the list of their calls."""

    def install(model):
        calls = []
        (_, mixer), *_ = mixers_of(model, model.config.get_text_config())
        space = vars(sys.modules[type(mixer).__module__])
        for name, (path, kernel) in KERNELS.items():
            if name not in space:
                continue
            original = inspect.unwrap(space[name])
            for place in packages(path):
                monkeypatch.setitem(sys.modules, place, types.ModuleType(place))
            for outer, inner in itertools.pairwise(packages(path)):
                setattr(sys.modules[outer], inner.rpartition(".")[2], sys.modules[inner])
            setattr(sys.modules[path], kernel.__name__, stand_in(name, kernel, original, calls))
            with_fallback = hub_kernels.use_kernel_func_from_hub_with_fallback(kernel.__name__, packages(path)[0])
            monkeypatch.setitem(space, name, with_fallback(original))
        return calls

    return install


def used(calls):
    return {name for name in calls if name != "mamba2_split_conv1d_scan_combined"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba"])
def test_installed_kernels_are_used_and_give_the_same_results(model_type, kernels):
    """On one device and over a ring, with the gradients of states, which the kernel of Mamba does not have."""
    expected = {kind: alone(tiny_model(model_type, "eager"), *batch(kind)) for kind in ("left", "packed")}
    one, models = tiny_model(model_type, "eager"), [tiny_model(model_type, "eager") for _ in range(2)]
    calls = kernels(one)
    for kind, answer in expected.items():
        calls.clear()
        check(logits_and_gradients(ra.patch_model(one), *batch(kind)), answer)
        assert used(calls)
    alone_calls = used(calls)
    calls.clear()
    for found in on_ranks(lambda ring, model: over_ring(model.train(), ring, *batch("packed")), iter(models).__next__):
        check(found, expected["packed"])
    assert used(calls) == alone_calls
