"""Models inside one graph of torch.compile: equal to the same models without it, for any rows, on one device and on rings."""

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaForCausalLM

import hf_ring_attention as ra
from hf_ring_attention.hf.call import graph
from hf_ring_attention.hf.model.wrappers import attachment_of, cache_argument, cache_in
from hf_ring_attention.hf.rows.join import NotFormed
from tests.hf.alike import refused
from tests.support.tiny_models import tiny_model
from tests.support.tolerance import EXACT, distance, gradients_distance
from tests.support.training import tiny_llama

pytestmark = [
    pytest.mark.own_dtypes,  # nothing is compiled if tests.support.tolerance turns float32 into float64
    # Dynamo asks every tensor that comes in for its gradient, and warns of it.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

LENGTHS = (32, 40, 57)
PATTERN = "pyramid:8,2,2,2"
#: Transformers computes losses in float32: sums in another order differ by a few roundings of it.
LOSS = 16 * torch.finfo(torch.float32).eps


def batch(length, kind, first=None):
    """Two rows of tokens: plain ones, padded ones, or packed documents; `first`: the length of the first document."""
    generator = torch.Generator().manual_seed(length)
    rows = {"input_ids": torch.randint(0, 97, (2, length), generator=generator), "use_cache": False}
    if kind == "padded":
        rows["attention_mask"] = torch.ones(2, length, dtype=torch.int64)
        rows["attention_mask"][0, :5] = rows["attention_mask"][1, -3:] = 0
    elif kind == "packed":
        cut = first or length // 3
        rows["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(2, -1)
    return rows


def step(call, model, rows):
    """(loss, gradients by name) of a call; gradients are the mean of the ranks', as DDP takes it."""
    model.zero_grad()
    loss = call(**rows, labels=rows["input_ids"]).loss
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    for x in gradients.values() if call is not model and dist.is_initialized() else ():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return loss.item(), gradients


def llama(ring=None, layers=1, pattern=PATTERN):
    """Most graphs show on one layer what they show on two, in half of the time."""
    return ra.patch_model(tiny_llama(pattern, num_hidden_layers=layers).double(), ring=ring)


def in_windows():
    """A model with sliding windows, and fewer heads of keys than of queries."""
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 1, "sliding_window": 6}
    return ra.patch_model(tiny_model("mistral", "eager", **sizes).double())


def compiled(model, backend="eager", **options):
    """The model in one graph, and the counter of its compilations; "aot_eager" has the backward pass in a graph too."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def same(found, expected):
    assert abs(found[0] - expected[0]) <= LOSS * abs(expected[0])
    assert gradients_distance(found[1], expected[1]) <= EXACT


def check_lengths(model, alone, lengths, kind, backend):
    """Returns the compiled model."""
    call, counter = compiled(model, backend, dynamic=len(lengths) > 1)
    counts = []
    for length in lengths:
        same(step(call, model, batch(length, kind)), step(alone, alone, batch(length, kind)))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0, "every length was compiled anew"
    return call


@pytest.mark.parametrize(
    ("make", "kind", "backend"),
    [
        (llama, "packed", "eager"),
        pytest.param(llama, "padded", "aot_eager", marks=pytest.mark.slow),
        pytest.param(llama, "plain", "eager", marks=pytest.mark.slow),
        pytest.param(in_windows, "padded", "eager", marks=pytest.mark.slow),
        pytest.param(in_windows, "packed", "eager", marks=pytest.mark.slow),
    ],
)
def test_one_device(make, kind, backend):
    """Any length in one compilation for each kind of arguments."""
    model = make()
    check_lengths(model, model, LENGTHS, kind, backend)


def _on_a_ring(rank, transport, layout, lengths, kind, layers):
    """The same over a ring, against one process."""
    alone, model = llama(None, layers), llama(ra.Ring(transport=transport, layout=layout), layers)
    call, rows = check_lengths(model, alone, lengths, kind, "aot_eager"), batch(lengths[-1], kind)
    if layout == "zigzag":
        with torch.no_grad():
            assert distance(call(**rows).logits, alone(**rows).logits) <= EXACT
            assert isinstance(call(**rows, labels=rows["input_ids"]).logits, NotFormed)
            hidden = torch.compile(model.model, fullgraph=True, backend="eager")(**rows).last_hidden_state
            assert distance(hidden, alone.model(**rows).last_hidden_state) <= EXACT


@pytest.mark.parametrize(
    "settings",
    [
        ("collective", "contiguous", LENGTHS[1:2], "padded", 1),
        pytest.param(("ring", "auto", LENGTHS, "packed", 2), marks=pytest.mark.slow),
        pytest.param(("auto", "zigzag", LENGTHS[:1], "packed", 1), marks=pytest.mark.slow),
    ],
)
def test_over_a_ring(ranks, settings):
    ranks.run(_on_a_ring, 2, *settings)


def _breaking(rank):
    """Calls that graphs hold and others in turn, soon without compilations left, against one process."""
    alone, model = llama(layers=2), llama(ra.Ring(), layers=2)
    ids = batch(37, "plain")["input_ids"]
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    calls = [{"labels": ids, "shift_labels": shifted}, {"labels": ids}, {"output_hidden_states": True}]
    calls += [{"logits_to_keep": 3}, {"use_cache": True}, {"labels": ids, "attention_mask": torch.ones_like(ids)}]
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        call = torch.compile(model, backend="eager")
        for arguments in (*calls, *calls):
            found, expected = (x(ids, **{"use_cache": False, **arguments}) for x in (call, alone))
            if "labels" in arguments:
                assert abs(found.loss - expected.loss) <= LOSS * expected.loss
                continue
            states = [(x.logits, *(x.hidden_states or ())) for x in (found, expected)]
            assert all(distance(*of_both) <= EXACT for of_both in zip(*states, strict=True))


@pytest.mark.slow
def test_graphs_that_break_over_a_ring(ranks):
    ranks.run(_breaking, 2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("pattern", ["exact", PATTERN])
def test_by_inductor(pattern):
    """Compiled code in float32, against float64; the error of the model without torch.compile bounds it."""
    rows = batch(48, "padded" if pattern == PATTERN else "plain")
    exact, model = llama(pattern=pattern), ra.patch_model(tiny_llama(pattern, num_hidden_layers=1))
    torch.compiler.reset()
    call = torch.compile(model, fullgraph=True)
    _, expected = step(exact, exact, rows)
    allowed = 8 * gradients_distance(step(model, model, rows)[1], expected)
    with torch._inductor.config.patch({"cpp.cxx": (None, "g++")}):  # tests/conftest.py names none
        assert gradients_distance(step(call, model, rows)[1], expected) <= allowed


@pytest.mark.slow
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
    for call in (model, compiled(model, "aot_eager")[0]):
        passes.clear()
        same(step(call, model, batch(40, "plain")), expected)
        assert len(passes) == (2 if kept else 4)


def _disagreeing(rank):
    """Calls in a graph that ranks make differently; an equal call follows them."""
    model, alone, rows = llama(ra.Ring()), llama(), batch(32, "plain")
    model(**rows, labels=rows["input_ids"])  # An eager step changes nothing.
    call, _ = compiled(model, "aot_eager")
    labels = rows["input_ids"].clone()
    labels[0, 3 + rank] = 5
    refused("the ranks of the ring disagree on labels", call, **rows, labels=labels)
    losses = [call(**rows, labels=rows["input_ids"]).loss for _ in range(2)]
    order = [losses[number] for number in ((0, 1), (1, 0))[rank]]
    said = "disagree on the call: rank 0: the backward pass of call"
    refused(said, lambda: [loss.backward() for loss in order], error=(ValueError, RuntimeError))
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += rank
    refused("the ranks of the ring disagree on the model's weights", call, **rows, labels=rows["input_ids"])
    with torch.no_grad():
        model.lm_head.weight[-1, -1] -= rank
    same(step(call, model, rows), step(alone, alone, rows))


@pytest.mark.slow
def test_ranks_that_disagree_in_a_graph(ranks):
    ranks.run(_disagreeing, 2)


#: Positions with a gap.
GAP = torch.cat([torch.arange(10), torch.arange(20, 42)]).expand(2, -1)


@pytest.mark.slow
def test_rows_without_a_plain_mask():
    """Positions with a gap and no mask mean the same as without a graph; a mask of numbers needs positions there."""
    model, rows = llama(), batch(32, "plain")
    call, _ = compiled(model)
    numbered = (torch.arange(32) // 16 + 1).expand(2, -1)
    restarts = {"attention_mask": numbered, "position_ids": torch.arange(32).remainder(16).expand(2, -1)}
    with torch.no_grad():
        said = "packed rows without positions: pass position_ids that"
        refused(said, call, **rows, attention_mask=numbered, error=NotImplementedError)
        for more in ({"position_ids": GAP}, restarts, {"position_ids": torch.full_like(GAP, 3)}):
            assert distance(call(**rows, **more).logits, model(**rows, **more).logits) <= EXACT, [*more]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "afmoe"])
@torch.no_grad()
def test_gaps_in_models_whose_masks_know_no_positions(model_type):
    """They begin no document there, as without a graph."""
    model, rows = ra.patch_model(tiny_model(model_type, "eager").double()), batch(32, "plain")
    found = torch.compile(model, backend="eager")(**rows, position_ids=GAP).logits
    assert distance(found, model(**rows, position_ids=GAP).logits) <= EXACT


@pytest.mark.slow
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


def test_backward_passes_that_wait():
    """Several forward passes, more than keep their plans, and their backward passes in another order.

    A new pattern, and forward passes of other models, may come before them.
    """
    model, other = llama(), llama()
    call, _ = compiled(model, "aot_eager")
    batches = [batch(40, "packed", first) for first in range(3, 38, 5)]
    expected = {}
    for rows in batches:
        for name, x in step(model, model, rows)[1].items():
            expected[name] = expected.get(name, 0) + x
    model.zero_grad()
    losses = [call(**rows, labels=rows["input_ids"]).loss for rows in batches]
    ra.patch_model(model, "window:4")
    for rows in batches:
        other(**rows)
    for number in (3, 0, 6, 2, 5, 1, 4):
        losses[number].backward()
    assert gradients_distance({name: x.grad for name, x in model.named_parameters()}, expected) <= EXACT


@torch.no_grad()
def test_a_graph_follows_the_pattern():
    """A new pattern, or `exact_attention`, is obeyed by a model that was compiled before."""
    model, rows = llama(), batch(40, "plain")
    call, _ = compiled(model)
    found = [(call(**rows).logits, model(**rows).logits)]
    with ra.exact_attention(model):
        found.append((call(**rows).logits, model(**rows).logits))
    ra.patch_model(model, "window:4")
    found.append((call(**rows).logits, model(**rows).logits))
    assert all(torch.equal(*of_both) for of_both in found)
    assert all(distance(other, found[0][0]) > 1e-3 for other, _ in found[1:])


@pytest.mark.slow
def test_autocast():
    """bfloat16 in a graph as without one."""
    model, rows = ra.patch_model(tiny_llama(PATTERN)), batch(40, "padded")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(model)[0](**rows).logits, model(**rows).logits)


@torch.no_grad()
def continued(call):
    """The logits of a token behind a cache."""
    ids = batch(32, "plain")["input_ids"]
    return call(ids[:, :1], use_cache=True, **cache_argument(cache_in(call(ids, use_cache=True)))).logits


@torch.no_grad()
def of_rows(call):
    return call(**batch(32, "plain")).logits


@pytest.mark.parametrize("call", [of_rows, pytest.param(continued, marks=pytest.mark.slow)])
def test_what_a_graph_cannot_hold_breaks_it(call):
    """The result is right all the same; with fullgraph=True the reason is named. A copy is patched again first."""
    model = llama().eval()
    broken = copy.deepcopy(model) if call is of_rows else model
    torch.compiler.reset()
    assert distance(call(torch.compile(broken, backend="eager")), call(broken)) <= EXACT
    said = "holds decoders of text in a compiled graph"
    refused(said, call, compiled(broken)[0], error=torch._dynamo.exc.Unsupported)
    if call is of_rows:
        assert distance(call(compiled(ra.patch_model(broken))[0]), call(model)) <= EXACT


@pytest.mark.slow
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


@torch.no_grad()
def test_padding_inside_a_document_is_refused():
    call, rows = compiled(ra.patch_model(tiny_llama(PATTERN, num_hidden_layers=1)))[0], batch(32, "padded")
    rows["attention_mask"][0, 10] = 0
    refused("in one graph got padding inside a document", call, **rows, error=NotImplementedError)


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

    alone, model, rows = make(), make(ra.Ring()), batch(LENGTHS[1], "padded")
    same(step(compiled(model)[0], model, rows), step(alone, alone, rows))


@pytest.mark.slow
def test_a_forward_of_the_users_own_over_a_ring(ranks):
    """It gets the hidden states of whole rows, and its labels as they are."""
    ranks.run(_with_own_forward, 2)
