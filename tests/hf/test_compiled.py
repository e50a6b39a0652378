"""Models inside one graph of torch.compile: equal to the same models without it, for any rows, on one device and on rings."""

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.call import graph
from hf_ring_attention.hf.model.wrappers import attachment_of
from hf_ring_attention.hf.rows.join import NotFormed
from tests.support.ranks import RankPool
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, distance, gradients_distance
from tests.support.training import tiny_llama

pytestmark = [
    pytest.mark.own_dtypes,  # nothing is compiled if tests.support.tolerance turns float32 into float64
    # Dynamo asks every tensor that comes in for its gradient, and warns of it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LENGTHS = (32, 40, 57, 33, 61)
PATTERN = "pyramid:8,2,2,2"
#: Transformers computes losses in float32: sums in another order differ by a few roundings of it.
LOSS = 16 * torch.finfo(torch.float32).eps


def batch(length, kind, vocab=97):
    """Two rows of tokens: plain ones, padded ones, or packed documents."""
    generator = torch.Generator().manual_seed(length)
    rows = {"input_ids": torch.randint(0, vocab, (2, length), generator=generator), "use_cache": False}
    if kind == "padded":
        rows["attention_mask"] = torch.ones(2, length, dtype=torch.int64)
        rows["attention_mask"][0, :5] = rows["attention_mask"][1, -3:] = 0
    elif kind == "packed":
        cut = length // 3
        rows["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(2, -1)
    return rows


def step(call, model, rows, with_labels=True):
    """(loss, gradients by name) of a call."""
    model.zero_grad()
    if with_labels:
        loss = call(**rows, labels=rows["input_ids"]).loss
    else:
        loss = call(**rows).logits.square().mean()
    loss.backward()
    return loss.item(), {name: x.grad.clone() for name, x in model.named_parameters()}


def llama(ring=None, layers=1, pattern=PATTERN):
    """Most graphs show on one layer what they show on two, in half of the time."""
    return ra.patch_model(tiny_llama(pattern, num_hidden_layers=layers).double(), ring=ring)


@pytest.fixture(scope="module")
def compilers():
    """Processes that stay, since the first graph of a process takes seconds more; each function resets them."""
    with RankPool() as pool:
        yield pool


def compiled(model, **options):
    """The model in one graph, and the counter of its compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def same(found, expected):
    assert abs(found[0] - expected[0]) <= LOSS * abs(expected[0])
    assert gradients_distance(found[1], expected[1]) <= EXACT


def averaged(results):
    """The loss, and the mean of the ranks' gradients, as DDP takes it."""
    for x in results[1].values():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return results


def in_windows():
    """A model with sliding windows, and fewer heads of keys than of queries."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 6}
    torch.manual_seed(0)
    return ra.patch_model(MistralForCausalLM(MistralConfig(**sizes, **heads)).double())


@pytest.mark.parametrize("make", [llama, in_windows])
def test_one_device(make):
    """Any length, padding and packing, in one compilation for each kind of arguments."""
    model = make()
    call, counter = compiled(model, dynamic=True)
    counts = []
    for length in LENGTHS:
        for kind in ("padded", "packed", "plain")[: 2 if make is in_windows else 3]:
            rows = batch(length, kind)
            same(step(call, model, rows), step(model, model, rows))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1], "every length was compiled anew"


def _on_a_ring(rank):
    """The same over a ring, against one process; gradients are averaged as DDP averages them."""
    cases = [  # transport, layout, lengths, kind of rows, whether labels are given, layers
        ("ring", "auto", LENGTHS, "packed", True, 2),
        ("auto", "zigzag", LENGTHS[:1], "packed", False, 1),
        ("collective", "contiguous", LENGTHS[3:], "padded", True, 1),
    ]
    for transport, layout, lengths, kind, with_labels, layers in cases:
        alone, model = llama(None, layers), llama(ra.Ring(transport=transport, layout=layout), layers)
        call, counter = compiled(model, dynamic=len(lengths) > 1)
        counts = []
        for length in lengths:
            rows = batch(length, kind)
            same(averaged(step(call, model, rows, with_labels)), step(alone, alone, rows, with_labels))
            counts.append(counter.frame_count)
        assert counts[0] == counts[-1], "every length was compiled anew"
    with torch.no_grad():
        assert isinstance(call(**rows, labels=rows["input_ids"]).logits, NotFormed)
        hidden = torch.compile(model.model, fullgraph=True, backend="aot_eager")(**rows).last_hidden_state
        assert distance(hidden, alone.model(**rows).last_hidden_state) <= EXACT


def test_over_a_ring(compilers):
    compilers.run(_on_a_ring, 2)


def _breaking(rank, limit, layers):
    """Calls that graphs hold and others in turn, with and without compilations left, against one process."""
    alone, model = llama(None, layers), llama(ra.Ring(), layers)
    ids = batch(37, "plain")["input_ids"]
    calls = [
        {"labels": ids, "shift_labels": torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)},
        {"labels": ids},
        {"output_hidden_states": True},
        {"logits_to_keep": 3},
        {"use_cache": True},
        {"return_dict": False},
        {"labels": ids, "attention_mask": torch.ones_like(ids)},
    ]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=limit):
        call = torch.compile(model, backend="aot_eager")
        for arguments in (*calls, *calls):
            found, expected = (x(ids, **{"use_cache": False, **arguments}) for x in (call, alone))
            if "return_dict" in arguments:
                assert distance(found[0], expected[0]) <= EXACT
                continue
            if "labels" in arguments:
                assert abs(found.loss - expected.loss) <= LOSS * expected.loss
                continue
            assert distance(found.logits, expected.logits) <= EXACT
            for mine, whole in zip(found.hidden_states or (), expected.hidden_states or ()):
                assert distance(mine, whole) <= EXACT


@pytest.mark.parametrize(("limit", "layers"), [(1, 2), (8, 1)])
def test_graphs_that_break_over_a_ring(limit, layers, compilers):
    compilers.run(_breaking, 2, limit, layers)


@pytest.mark.drawn
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("pattern", ["exact", PATTERN])
def test_by_inductor(pattern):
    """Compiled code in float32, against float64; the error of the model without torch.compile bounds it."""
    rows = batch(48, "padded" if pattern == PATTERN else "plain")
    exact, model = llama(pattern=pattern), ra.patch_model(tiny_llama(pattern, num_hidden_layers=1))
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True)
    _, expected = step(exact, exact, rows)
    allowed = 8 * gradients_distance(step(model, model, rows)[1], expected)
    with torch._inductor.config.patch({"cpp.cxx": (None, "g++")}):  # tests/conftest.py names none
        assert gradients_distance(step(call, model, rows)[1], expected) <= allowed


@pytest.mark.parametrize("kept", [True, False])
def test_checkpointed_layers(kept, monkeypatch):
    """A graph keeps attention too, and computes it once."""
    from hf_ring_attention.ring import engine

    model, passes = llama(layers=2).train(), []
    forward_pass = engine.forward_pass
    monkeypatch.setattr(engine, "forward_pass", lambda *args: passes.append(1) or forward_pass(*args))
    expected = step(model, model, batch(40, "plain"))
    assert len(passes) == 2
    options = {"use_reentrant": False, **({"context_fn": ra.keep_attention} if kept else {})}
    model.activation_checkpointing_enable(options)
    for call in (model, compiled(model)[0]):
        passes.clear()
        same(step(call, model, batch(40, "plain")), expected)
        assert len(passes) == (2 if kept else 4)


def _disagreeing(rank):
    """The errors of calls in a graph that ranks make differently; equal calls follow each."""
    model = llama(ra.Ring())
    model(**batch(32, "plain"), labels=batch(32, "plain")["input_ids"])  # An eager step changes nothing.
    call, _ = compiled(model)
    rows = batch(32, "plain")

    def error_of(run):
        with pytest.raises((ValueError, RuntimeError)) as error:
            run()
        return str(error.value)

    other = rows["input_ids"].clone()
    other[0, 3 + rank] = 5
    errors = [error_of(lambda: call(**rows, labels=other))]
    losses = [call(**rows, labels=rows["input_ids"]).loss for _ in range(2)]
    errors.append(error_of(lambda: [losses[number].backward() for number in ((0, 1), (1, 0))[rank]]))
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += rank
    errors.append(error_of(lambda: call(**rows, labels=rows["input_ids"])))
    with torch.no_grad():
        model.lm_head.weight[-1, -1] -= rank
    alone = llama()
    same(averaged(step(call, model, rows)), step(alone, alone, rows))
    return errors


def test_ranks_that_disagree_in_a_graph(compilers):
    for labels, order, weights in compilers.run(_disagreeing, 2):
        assert "the ranks of the ring disagree on labels" in labels
        assert "disagree on the call: rank 0: the backward pass of call" in order
        assert "the ranks of the ring disagree on the model's weights" in weights


def test_rows_without_a_plain_mask():
    """Positions with a gap and no mask mean the same as without a graph; a mask of numbers needs positions there."""
    model, rows = llama(), batch(32, "plain")
    call, _ = compiled(model)
    numbered = torch.ones(2, 32, dtype=torch.int64)
    numbered[:, 16:] = 2
    gap = torch.cat([torch.arange(10), torch.arange(20, 42)]).expand(2, -1)
    restarts = {"attention_mask": numbered, "position_ids": torch.arange(32).remainder(16).expand(2, -1)}
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match="packed rows without positions: pass position_ids that"),
    ):
        call(**rows, attention_mask=numbered)
    for more in ({"position_ids": gap}, restarts, {"position_ids": gap.clone().fill_(3)}):
        with torch.no_grad():
            assert distance(call(**rows, **more).logits, model(**rows, **more).logits) <= EXACT, [*more]


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", ["gpt_oss", "afmoe"])
def test_gaps_in_models_whose_masks_know_no_positions(model_type):
    """They begin no document there, as without a graph."""
    model, row = ra.patch_model(tiny_model(model_type, "eager").double()), batch(32, "plain")["input_ids"]
    inputs = {
        "input_ids": row,
        "position_ids": torch.cat([torch.arange(10), torch.arange(20, 42)]).expand(len(row), -1),
    }
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**inputs, use_cache=False).logits
        assert distance(found, model(**inputs, use_cache=False).logits) <= EXACT


@pytest.mark.parametrize("hidden", [False, True])
def test_positions_that_skip_where_code_hides_what_masks_know(hidden, monkeypatch):
    monkeypatch.setattr(graph, "masks_follow_positions", lambda forward: None if hidden else True)
    call, _ = compiled(llama())
    positions = torch.arange(32).remainder(16).expand(2, -1)
    call(**batch(32, "plain"), position_ids=positions)
    with pytest.raises(ValueError, match="pass an attention_mask of ones") if hidden else nullcontext():
        call(**batch(32, "plain"), position_ids=positions + (positions > 7))


def test_a_window_in_the_mask_alone_breaks_the_graph():
    model = ra.patch_model(tiny_model("phimoe", "ring_dilated", sliding_window=6))
    assert not attachment_of(model).in_graphs and attachment_of(in_windows()).in_graphs


def test_a_backward_pass_keeps_its_pattern():
    """A new pattern, and forward passes of other models, may come before it."""
    model, other = (llama() for _ in "ab")
    rows, (call, _) = batch(40, "plain"), compiled(model)
    _, expected = step(model, model, rows)
    model.zero_grad()
    loss = call(**rows, labels=rows["input_ids"]).loss
    ra.patch_model(model, "window:4")
    for _ in range(6):
        torch.compile(other, backend="eager")(**rows)
    loss.backward()
    assert gradients_distance({name: x.grad for name, x in model.named_parameters()}, expected) <= EXACT


def test_backward_passes_that_wait():
    """Several forward passes, more than keep their plans, and their backward passes in another order."""
    model = llama()
    call, _ = compiled(model, dynamic=True)
    batches = [batch(length, "packed") for length in (*LENGTHS, 47, 36)]
    expected = {}
    for rows in batches:
        for name, x in step(model, model, rows)[1].items():
            expected[name] = expected.get(name, 0) + x
    model.zero_grad()
    losses = [call(**rows, labels=rows["input_ids"]).loss for rows in batches]
    for number in (3, 0, 6, 2, 5, 1, 4):
        losses[number].backward()
    assert gradients_distance({name: x.grad for name, x in model.named_parameters()}, expected) <= EXACT


def test_a_graph_follows_the_pattern():
    """A new pattern, or `exact_attention`, is obeyed by a model that was compiled before."""
    model = llama()
    call, _ = compiled(model)
    rows = batch(40, "plain")
    with torch.no_grad():
        sparse, plain = call(**rows).logits, model(**rows).logits
        with ra.exact_attention(model):
            exact, plain_exact = call(**rows).logits, model(**rows).logits
        ra.patch_model(model, "window:4")
        window, plain_window = call(**rows).logits, model(**rows).logits
    assert torch.equal(sparse, plain) and torch.equal(exact, plain_exact) and torch.equal(window, plain_window)
    assert distance(exact, sparse) > 1e-3 and distance(window, sparse) > 1e-3


def test_autocast():
    """bfloat16 in a graph as without one."""
    model = ra.patch_model(tiny_llama(PATTERN))
    call, _ = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = call(**batch(40, "padded")).logits, model(**batch(40, "padded")).logits
    assert torch.equal(found, expected)


def continued(call):
    """The logits of a token behind a cache."""
    ids = batch(32, "plain")["input_ids"]
    with torch.no_grad():
        first = call(ids, use_cache=True)
        name = next(name for name in ("cache", "past_key_values") if name in first)
        return call(ids[:, :1], use_cache=True, **{name: first[name]}).logits


def test_what_a_graph_cannot_hold_breaks_it():
    """The result is right all the same; with fullgraph=True the reason is named. A copy is patched again first."""
    model = llama().eval()
    copied, rows = copy.deepcopy(model), batch(32, "plain")
    for broken, call in ((model, continued), (copied, lambda model: model(**rows).logits)):
        torch._dynamo.reset()
        assert distance(call(torch.compile(broken, backend="aot_eager")), call(broken)) <= EXACT
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="holds decoders of text in a compiled graph"):
            call(torch.compile(broken, fullgraph=True, backend="aot_eager"))
    call, _ = compiled(ra.patch_model(copied))
    assert distance(call(**rows).logits, model(**rows).logits) <= EXACT


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_call_that_ctrl_c_ended_keeps_no_graph_from_beginning(compiled_before):
    model, rows = llama(layers=2), batch(32, "plain")
    call, counter = compiled(model)
    expected = model(**rows).logits
    if compiled_before:
        call(**rows)

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**rows)
    hook.remove()
    assert distance(call(**rows).logits, expected) <= EXACT and counter.frame_count > 0


def test_padding_inside_a_document_is_refused():
    model, rows = ra.patch_model(tiny_llama(PATTERN)), batch(32, "padded")
    rows["attention_mask"][0, 10] = 0
    with pytest.raises(NotImplementedError, match="in one graph got padding inside a document"):
        compiled(model)[0](**rows)


class Rolled(LlamaForCausalLM):
    """A forward of the user's own, with two losses."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        losses = [self.loss_function(output.logits, x, self.config.vocab_size) for x in (labels, labels.roll(-1, 1))]
        output.loss = losses[0] + 0.3 * losses[1]
        return output


def _with_own_forward(rank):
    def make(ring=None):
        model = tiny_llama(PATTERN, num_hidden_layers=1).double()
        model.__class__ = Rolled
        return ra.patch_model(model, ring=ring)

    alone, model, rows = make(), make(ra.Ring()), batch(LENGTHS[2], "padded")
    call, _ = compiled(model)
    same(averaged(step(call, model, rows)), step(alone, alone, rows))


def test_a_forward_of_the_users_own_over_a_ring(compilers):
    """It gets the hidden states of whole rows, and its labels as they are."""
    compilers.run(_with_own_forward, 2)
