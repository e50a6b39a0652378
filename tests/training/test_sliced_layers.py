"""Layers in slices: results and gradients of whole rows, one gradient a parameter, less memory, and refusals on all ranks."""

import collections
import copy
import pickle
import re

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import hf_ring_attention as ra
from hf_ring_attention.cost.trace import LiveBytes
from hf_ring_attention.hf.model.config import warn_once
from tests.support.ranks import on_ranks
from tests.support.tiny_models import CAUSAL_TYPES, INNER, NOT_BUILT, tiny_config, tiny_model
from tests.support.tolerance import EXACT, allowed, assert_exact, distance, gradients_distance
from tests.support.training import tiny_llama, whole

pytestmark = pytest.mark.usefixtures("in_float64")


def tokens(*shape, seed=1):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def step(model, ids):
    """The logits, the gradients, and how often each parameter got one."""
    fired, parameters = collections.Counter(), model.named_parameters()
    hooks = [x.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name])) for name, x in parameters]
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    for hook in hooks:
        hook.remove()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, fired


def slices_of(model):
    """A list that gets the tokens of each slice of the first MLP, as its last layer gets them."""
    seen = []
    mlp = next(x for x in model.modules() if type(x).__name__ == "LlamaMLP")
    mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:-1])))
    return seen


# With tensors beside the input, weights in another order, a list of layers, and one MLP that all layers share.
TYPES = ("llama", "bloom", "gpt2", "ctrl", "xlm", "zamba2", "recurrent_gemma", "prophetnet")


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", TYPES)
def test_slices_are_whole_rows(model_type):
    model, ids = tiny_model(model_type, "eager"), tokens(2, 23)
    logits, gradients, _ = step(model, ids)
    for tokens_at_once in (10, 1):  # slices of 5, 5, 5, 5 and 3 tokens of both rows
        sliced, found, fired = step(ra.sliced_layers(model, tokens_at_once), ids)
        assert_exact(sliced, logits)
        assert gradients_distance(found, gradients) <= EXACT and {*fired.values()} == {1}
        assert fired.keys() == gradients.keys() == found.keys()


def test_a_norm_of_the_head_is_left_to_the_loss(monkeypatch):
    """The loss asks for a few tokens of it at once; slices of the norm would form the logits of all tokens."""
    monkeypatch.setattr("hf_ring_attention.hf.loss.lm_loss.tokens_at_once", lambda *_: 7)
    config, ids = tiny_config("modernbert-decoder", vocab_size=4096), tokens(1, 300)
    model = ra.patch_model(AutoModelForCausalLM.from_config(config).train(), ring=ra.Ring.alone())

    def peak():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # The first call makes the plan.
        with LiveBytes() as live:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return live.peak

    whole = peak()
    ra.sliced_layers(model, 10)
    assert peak() <= whole


def test_short_rows_and_rows_without_gradients_are_not_computed_again():
    model = ra.sliced_layers(tiny_llama(None), 10)
    seen = slices_of(model)
    step(model, tokens(1, 10))
    assert seen == [(1, 10)]
    with torch.no_grad():
        model(tokens(3, 10))
    assert seen[1:] == [(3, 3), (3, 3), (3, 3), (3, 1)]


def test_a_ring_has_the_gradients_of_one_process():
    ids = tokens(2, 41)
    loss = tiny_llama()(ids, labels=ids).loss
    whole_model = tiny_llama()
    whole_model(ids, labels=ids).loss.backward()

    def work(ring, model):
        found = ra.sliced_layers(model, 8)(ids, labels=ids).loss
        found.backward()
        assert_exact(found.detach(), loss.detach())
        return [p.grad for p in model.parameters()]

    for number, parts in enumerate(zip(*on_ranks(work, tiny_llama), strict=True)):
        assert_exact(torch.stack(parts).mean(0), [*whole_model.parameters()][number].grad)


def test_masks_of_dropout_are_the_same_in_backward():
    """GPT-2 drops outputs of its MLP."""
    mlp = tiny_model("gpt2", "eager", resid_pdrop=0.5).transformer.h[0].mlp.train()
    x = torch.randn(1, 7, 32)

    def gradients(compute):
        torch.manual_seed(3)
        mlp.zero_grad()
        out = compute(x)
        out.square().sum().backward()
        return out.detach(), {n: p.grad.clone() for n, p in mlp.named_parameters()}

    expected, of_weights = gradients(lambda x: torch.cat([mlp(part) for part in x.split(3, 1)], 1))
    model = tiny_model("gpt2", "eager")
    model.transformer.h[0].mlp = mlp
    ra.sliced_layers(model, 3)
    found, again = gradients(mlp)
    assert 0.2 < float((expected == 0).double().mean()) < 0.8
    assert_exact(found, expected)
    assert gradients_distance(again, of_weights) <= EXACT


@pytest.mark.own_dtypes
def test_autocast_adds_gradients_of_many_slices_in_the_dtype_of_the_weights():
    """The gradients of 256 equal slices: added in bfloat16, they would lose a quarter."""
    mlp = (model := tiny_llama(None, seed=2)).model.layers[0].mlp
    x = torch.randn(1, 1, 32).expand(1, 256, 32)

    def gradient():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            mlp(x).float().sum().backward()
        return mlp.down_proj.weight.grad

    expected = gradient()
    ra.sliced_layers(model, 1)
    assert distance(gradient(), expected) <= 0.02


def test_wide_tensors_exist_for_one_slice():
    """The inputs and outputs of all tokens, their gradients, and 6 numbers of the inner width for each token of a slice."""
    width, inner, count, at_once = 16, 512, 512, 64
    model = tiny_llama(None, hidden_size=width, intermediate_size=inner)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, count, width).requires_grad_()
    weights = sum(p.nbytes for p in mlp.parameters())

    def bytes_of(compute):
        mlp.zero_grad()
        with LiveBytes() as live:
            out = compute(2 * x)
            kept = live.now - out.nbytes
            out.backward(torch.ones_like(out))
        return kept - weights, live.peak - 2 * weights

    by_token, rows = 6 * inner * x.element_size(), x.nbytes
    assert by_token * count <= bytes_of(mlp)[1] <= by_token * count + 6 * rows
    ra.sliced_layers(model, at_once)
    for compute in (mlp, lambda x: checkpoint(mlp, x, use_reentrant=False)):
        kept, peak = bytes_of(compute)
        assert kept <= rows, "the input of all slices, once"
        assert by_token * at_once <= peak <= by_token * at_once + 6 * rows


def test_norms_save_their_input_only():
    """An RMSNorm in bfloat16 copies its input in float32, and backward makes five more; slices have these for a slice."""
    width, count, at_once = 64, 512, 32
    model = tiny_llama(None, hidden_size=width).bfloat16()
    norm, x = model.model.norm, torch.randn(1, count, width, dtype=torch.bfloat16).requires_grad_()
    rows = x.nbytes

    def bytes_of():
        norm.zero_grad()
        with LiveBytes(norm.parameters()) as live:
            out = norm(2 * x)
            kept = live.now - out.nbytes
            out.backward(torch.ones_like(out))
        return kept, live.peak

    kept, peak = bytes_of()
    assert kept >= 3 * rows and peak >= 12 * rows
    ra.sliced_layers(model, at_once)
    kept, peak = bytes_of()
    assert kept <= rows and peak <= 5 * rows + 14 * rows * at_once // count


#: Other layers that are as wide as MLPs.
OTHERS = "attn|attention|mixer|mamba|vision|image|audio|vqmodel|embedding_projection|projector|laurel|lm_head"
#: Types whose layers have the weights of their MLP themselves, or no MLP.
WITHOUT = {
    *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small"),
    *("camembert", "data2vec-text", "electra", "ernie", "falcon_mamba", "git", "mamba", "mamba2", "marian", "mbart"),
    *("megatron-bert", "mvp", "opt", "pegasus", "plbart", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "trocr", "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("model_type", [name for name in CAUSAL_TYPES if name not in NOT_BUILT])
def test_every_type(model_type):
    """Every wide layer is in an MLP that is sliced, and every norm is sliced, or the model is refused for a true reason."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if model_type in WITHOUT:
        told = f"{type(model).__name__} has no module named mlp, ffn or feed_forward"
        with pytest.raises(NotImplementedError, match=told):
            ra.sliced_layers(model)
        return
    experts = any("expert" in path for path, _ in model.named_parameters())
    ra.sliced_layers(model)
    sliced = {path for path, module in model.named_modules() if "forward" in vars(module)}
    inside = tuple(f"{path}." for path in sliced)
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and {INNER, 2 * INNER} & {*module.weight.shape}:
            assert experts or re.search(OTHERS, path) or path.startswith(inside), path
        whole = r"vision|image|audio|projector|embeddings|MultiHead|router" + r"|expert|\.mlp\." * experts
        named = f"{path} {type(module).__name__}"
        if re.search("(RMS|Layer)Norm$", named) and not re.search(whole, named) and not [*module.children()]:
            assert path in sliced or path.startswith(inside), path
        assert not (path in sliced and "experts" in path)


def test_experts_compute_whole_rows(caplog):
    """Dense layers and norms beside them compute slices; a warning names the first module with experts."""
    model, ids = tiny_model("deepseek_v3", "eager"), tokens(1, 20)
    logits, gradients, _ = step(model, ids)
    warn_once.cache_clear()
    for tokens_at_once in (5, 8):
        ra.sliced_layers(model, tokens_at_once)
    assert [x.message for x in caplog.records] == [
        "sliced_layers: model.layers.1.mlp (DeepseekV3MoE) sends tokens to experts, which may depend on all tokens: experts "
        "compute whole rows, norms and dense MLPs slices"
    ]
    assert "forward" in vars(model.model.layers[0].mlp) and "forward" in vars(model.model.layers[1].input_layernorm)
    assert "forward" not in vars(model.model.layers[1].mlp)
    sliced, found, _ = step(model, ids)
    assert_exact(sliced, logits)
    assert gradients_distance(found, gradients) <= EXACT


def test_norms_of_heads_compute_slices_of_tokens():
    """Qwen3 has [B, n, H, D] and Gemma 3 [B, H, n, D]; Cohere's weights of heads [H, D] stay whole."""
    for model_type, dim in (("qwen3", 1), ("gemma3_text", 2)):
        model, seen = ra.sliced_layers(tiny_model(model_type, "eager"), 10), []
        norm = model.model.layers[0].self_attn.q_norm
        norm.forward.own = lambda x, norm=norm, seen=seen: seen.append(x.shape) or type(norm).forward(norm, x)
        model(tokens(2, 23))
        assert [shape[dim] for shape in seen] == [5, 5, 5, 5, 3] and {len(shape) for shape in seen} == {4}
    cohere = ra.sliced_layers(tiny_model("cohere", "eager", use_qk_norm=True), 10).model.layers[0]
    assert "forward" in vars(cohere.input_layernorm) and "forward" not in vars(cohere.self_attn.q_norm)


def test_other_results_than_one_tensor_are_refused():
    """RWKV's feed-forward passes a state; another one mixes tokens."""
    model = ra.sliced_layers(tiny_model("rwkv", "eager"), 10)
    for length in (5, 20):  # ranks with short rows refuse with the others
        with pytest.raises(ValueError, match=r"expected a tensor of .* x width from RwkvFeedForward, got tuple"):
            model(tokens(1, length))
    model = tiny_llama(None)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x.mean(1, keepdim=True)
    ra.sliced_layers(model, 10)
    with pytest.raises(ValueError, match=r"expected a tensor of \(1, 10\) x width from LlamaMLP, got \(1, 1, 32\)"):
        model(tokens(1, 20))
    with pytest.raises(ValueError, match=r"inputs of one shape x width, got \[\(1, 2\), \(1, 3\)\] for LlamaMLP"):
        mlp(torch.ones(1, 2, 32), torch.ones(1, 3, 32))


def test_arguments_are_checked():
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="sliced_layers: tokens_at_once must be an integer of at least 1"):
            ra.sliced_layers(tiny_llama(), wrong)
    with pytest.raises(ValueError, match="sliced_layers: expected a Transformers model"):
        ra.sliced_layers(torch.nn.Linear(2, 2))


def test_it_can_be_undone():
    """Also over a forward that another library has put there."""
    model = tiny_llama(None)
    first, second = (layer.mlp for layer in model.model.layers)
    theirs = first.forward = lambda x: type(first).forward(first, x)
    seen = slices_of(model)
    for tokens_at_once, count in ((5, 4), (10, 2), (None, 1)):
        assert ra.sliced_layers(model, tokens_at_once) is model
        with torch.no_grad():
            model(tokens(1, 20))
        assert len(seen) == count
        seen.clear()
    assert first.forward is theirs and "forward" not in vars(second)
    ra.sliced_layers(model, None)
    assert first.forward is theirs and "forward" not in vars(second)


def with_a_module(layer):
    """As torch wraps what it checkpoints; returns what undoes it."""
    own, layer.mlp = layer.mlp, checkpoint_wrapper(layer.mlp)
    return lambda: setattr(layer, "mlp", own)


def with_a_hook(layer):
    """As Accelerate moves weights: by a function in place of the forward; returns what undoes it."""
    add_hook_to_module(layer.mlp, ModelHook())
    return lambda: remove_hook_from_module(layer.mlp)


@pytest.mark.parametrize("wrap", [with_a_module, with_a_hook])
def test_mlps_that_were_wrapped_since_are_sliced_anew_and_undone(wrap):
    model = tiny_llama(None)
    seen = slices_of(model)
    ra.sliced_layers(model, 5)
    unwrap = wrap(model.model.layers[0])
    for tokens_at_once, count in ((10, 2), (None, 1), (4, 5), (None, 1), ("unwrapped", 1), (10, 2)):
        if tokens_at_once == "unwrapped":
            unwrap()
        else:
            ra.sliced_layers(model, tokens_at_once)
        seen.clear()
        with torch.no_grad():
            model(tokens(1, 20))
        assert len(seen) == count, tokens_at_once


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_weights(copied, tmp_path):
    model, ids = ra.sliced_layers(tiny_llama(None), 10), tokens(1, 37)
    logits, gradients, _ = step(model, ids)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    seen = slices_of(other)
    again, found, _ = step(other, ids)
    assert_exact(again, logits)
    assert gradients_distance(found, gradients) <= EXACT and len(seen) == 8
    other.save_pretrained(tmp_path)
    assert_exact(step(type(other).from_pretrained(tmp_path, dtype=torch.float64), ids)[0], logits)


def test_a_compiled_mlp_is_one_graph():
    model, x = tiny_llama(None), torch.randn(1, 20, 32)
    mlp = model.model.layers[0].mlp
    expected = mlp(x)
    ra.sliced_layers(model, 8)
    assert_exact(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), expected)


# ---- on two ranks, with rows of other lengths

LENGTHS = (37, 12)


def expected_gradients(model):
    """The mean over ranks of the gradients of whole rows."""
    runs = [step(model, tokens(1, length, seed=length))[1] for length in LENGTHS]
    return {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}


def gradients_on(rank, wrap, reentrant):
    model = ra.sliced_layers(tiny_llama(None).train(), 10)
    expected = expected_gradients(ra.sliced_layers(copy.deepcopy(model), None))
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    seen, called = slices_of(model), model
    if wrap.startswith("ddp"):
        called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=wrap == "ddp unused")
    else:
        for part in (*(layer.mlp for layer in model.model.layers if wrap == "fsdp2"), *model.model.layers, model):
            fully_shard(part)
    _, found, fired = step(called, tokens(1, LENGTHS[rank], seed=LENGTHS[rank]))
    found = {name.removeprefix("module."): whole(x) for name, x in found.items()}
    assert {length for _, length in seen} == ({7, 10}, {2, 10})[rank]
    assert {*fired.values()} == {1} and found.keys() == expected.keys()
    assert gradients_distance(found, expected) <= EXACT


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("wrap", "reentrant"),
    [("ddp", None), ("ddp", True), ("ddp unused", None), ("ddp unused", False), ("fsdp2", None), ("fsdp2 of layers", False)],
)  # fmt: skip
def test_ranks_with_other_numbers_of_slices(wrap, reentrant, programs):
    programs.run(gradients_on, 2, wrap, reentrant)


def refused_by(rank):
    model = ra.sliced_layers(tiny_llama(None), 10)
    for layer in model.model.layers:
        fully_shard(layer.mlp.up_proj)
    fully_shard(model)
    told = "each slice would gather the weights of up_proj: shard "
    with pytest.raises(NotImplementedError, match=f"{told}LlamaMLP or its layer as one"):
        model(tokens(1, (20, 5)[rank]))
    with pytest.raises(NotImplementedError, match=rf"{told}model\.layers\.0\.mlp or"):
        ra.sliced_layers(model, 5)


def test_layers_that_are_sharded_by_themselves_are_refused_on_all_ranks(programs):
    """Their ranks would wait for each other in slices that only one of them has."""
    programs.run(refused_by, 2)


@pytest.mark.drawn
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_slices_inside_of_checkpoints(reentrant):
    model, ids = tiny_llama(None).train(), tokens(1, 37)
    logits, gradients, _ = step(model, ids)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    seen = slices_of(model)
    sliced, found, fired = step(ra.sliced_layers(model, 10), ids)
    assert_exact(sliced, logits)
    assert gradients_distance(found, gradients) <= EXACT
    assert {*fired.values()} == {1} and fired.keys() == gradients.keys()
    assert {*seen} == {(1, 7), (1, 10)} and len(seen) in {None: (8,), False: (11, 12), True: (12,)}[reentrant]


@pytest.mark.own_dtypes
def test_autocast():
    model, ids = tiny_llama(None, seed=2), tokens(1, 37)

    def run(autocast):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids).logits
        logits.float().square().mean().backward()
        return logits.detach().float(), {n: p.grad.clone() for n, p in model.named_parameters()}

    (exact, gradients), (rounded, of_rounded) = run(False), run(True)
    ra.sliced_layers(model, 10)
    sliced, found = run(True)
    assert distance(sliced, exact) <= allowed(distance(rounded, exact), torch.bfloat16)
    assert gradients_distance(found, gradients) <= allowed(gradients_distance(of_rounded, gradients), torch.bfloat16)
