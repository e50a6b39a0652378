"""How masks are read: padding, packing as collators describe it, windows, caches; and masks that are refused."""

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import (
    blockwise_overlay,
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

import hf_ring_attention as ra
from hf_ring_attention.hf.forward_pass import running
from hf_ring_attention.hf.layer.masks import tokens_of
from hf_ring_attention.hf.model.wrappers import cache_argument
from hf_ring_attention.hf.rows.documents import rows_of_call

from ..support.probe import TOKENS, distance
from ..support.tiny_models import VOCAB, tiny_config, tiny_model
from ..support.tolerance import EXACT
from .alike import assert_alike, assert_on_ranks, logits, refused

DOCUMENTS = (((0, 7), (7, 16), (16, 20)),)


def ids(rows=1, length=TOKENS):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def config_of(model_type="llama"):
    config = tiny_config(model_type)
    config._attn_implementation = "ring_dilated"
    return config


def made(create, config=None, mask=None, positions=None, rows=2):
    embeds = torch.zeros(rows, TOKENS, 1)
    extra = {} if positions is None else {"position_ids": positions}
    return create(
        config=config or config_of(), inputs_embeds=embeds, attention_mask=mask, **cache_argument(None), **extra
    )


def test_masks_say_what_eager_would_read():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :3] = mask[1, -4:] = 0
    said = tokens_of(made(create_causal_mask, mask=mask))
    assert said.documents == (((0, TOKENS),), ((3, TOKENS - 4),))
    assert (said.causal, said.own, said.before, said.length, said.written) == (True, None, 0, TOKENS, TOKENS)
    assert tokens_of(made(create_bidirectional_mask)).causal is False
    said = tokens_of(made(create_sliding_window_causal_mask, config_of("mistral"), mask=mask))
    assert (said.causal, said.own) == (True, (ra.Window, 6))
    positions = torch.cat([torch.arange(stop - start) for start, stop in DOCUMENTS[0]])[None]
    assert tokens_of(made(create_causal_mask, positions=positions, rows=1)).documents == DOCUMENTS


def test_a_copied_mask_says_the_same_until_its_pass_is_over():
    original = made(create_sliding_window_causal_mask, config_of("mistral"))
    for copied in (original.clone(), copy.deepcopy(original), original.to(torch.int64, copy=True)):
        assert tokens_of(copied) is tokens_of(original)
    copied = made(create_causal_mask).clone()
    with pytest.raises(RuntimeError, match="belongs to a forward pass that is over"):
        tokens_of(copied)


def test_plain_masks():
    for dtype in (torch.bool, torch.int64, torch.float32):
        said = tokens_of(torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype))
        assert said.documents == (((1, 3),), ((0, 2),))
        assert said.causal is None and said.own is None
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            mask = torch.ones(1, 8)
            assert tokens_of(mask).documents == (((0, 8),),)
            mask[0, :3] = 0  # A mask that is edited is read again.
            assert tokens_of(mask).documents == (((3, 8),),)
    assert tokens_of(None).documents is None


@pytest.mark.parametrize("pattern", ["exact", "longnet:4/1,12/2,all/4"])
def test_padding_inside_a_row_leaves_its_tokens_alone(pattern):
    """Two rows with padding in two places get the logits and gradients of the rows without padding."""
    model, document, mask = ra.patch_model(tiny_model("llama", "eager"), pattern), ids(2), torch.ones(2, 28).long()
    mask[0, [0, 1, 5, 6, 7, 20, 26, 27]] = mask[1, 3:11] = 0
    row = torch.zeros_like(mask).masked_scatter(mask.bool(), document)
    positions = mask.cumsum(-1) - 1
    padded = model(row, attention_mask=mask, position_ids=positions.clamp_min(0), use_cache=False).logits[mask.bool()]
    answers = []
    for found in (padded, model(document, use_cache=False).logits.flatten(0, 1)):
        model.zero_grad()
        found.square().sum().backward()
        answers.append([found.detach(), *(x.grad.clone() for x in model.parameters())])
    assert max(distance(*pair) for pair in zip(*answers)) <= EXACT


def test_a_pass_that_ctrl_c_ended_leaves_nothing_behind():
    model, row = ra.patch_model(tiny_model("llama", "eager")), ids(1)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = torch.stack(model.generate(row, **options).logits)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(row[:, :12], position_ids=positions, use_cache=False)
    hook.remove()
    assert torch.equal(torch.stack(model.generate(row, **options).logits), expected)
    assert_alike(*(logits(tiny_model("llama", name), row) for name in ("ring_dilated", "eager")))
    model(row)
    assert running().forward_pass is None


def llama():
    return tiny_model("llama", "eager")


def every_other(batch, head, query, key):
    return key % 2 == 0


def masked(create=create_causal_mask, model_type="llama", **functions):
    return tokens_of(
        create(config_of(model_type), torch.zeros(2, TOKENS, 1), None, **cache_argument(None), **functions)
    )


def test_blocks_without_tokens_and_windows_of_mask_functions_are_read():
    text = torch.full((2, TOKENS), -1)
    said = masked(or_mask_function=blockwise_overlay(text), and_mask_function=sliding_window_overlay(5))
    assert (said.causal, said.own) == (True, (ra.Window, 5))
    said = masked(block_sequence_ids=text, position_ids=torch.arange(TOKENS).remainder(8)[None])
    assert (said.causal, said.own, said.documents) == (True, None, (((0, 8), (8, 16), (16, TOKENS)),) * 2)
    said = masked(create_bidirectional_mask, and_mask_function=sliding_window_bidirectional_overlay(5))
    assert (said.causal, said.own) == (False, (ra.Window, 6))


@pytest.mark.parametrize(
    ("create", "model_type", "functions", "kinds"),
    [
        (create_causal_mask, "llama", {"or_mask_function": every_other}, "or_masks"),
        (create_causal_mask, "llama", {"and_mask_function": every_other}, r"causal_mask_function, .*\.every_other"),
        (create_causal_mask, "llama", {"block_sequence_ids": torch.zeros(2, TOKENS).long()}, "or_masks"),
        # Two windows, the later keys of a window, and documents that a ring would not know.
        (create_sliding_window_causal_mask, "mistral", {"and_mask_function": sliding_window_overlay(3)}, ".*overlay.*"),
        (create_bidirectional_mask, "bert", {"and_mask_function": sliding_window_overlay(3)}, ".*overlay"),
        (create_bidirectional_mask, "bert", {"and_mask_function": packed_sequence_mask_function(None)}, ".*packed.*"),
    ],
)
def test_other_mask_functions_are_refused(create, model_type, functions, kinds):
    refused(rf".*Model: .*cannot express this mask \({kinds}\).*'sdpa'", masked, create, model_type, **functions)


@pytest.mark.parametrize(
    ("ends", "numbers", "match"),
    [
        ([0, 7, 16], None, r"rise from 0 to the 20 tokens of one batch row, got \[0, 7, 16\]"),
        ([1, 20], None, "rise from 0"),
        ([0, 9, 9, 20], None, "rise from 0"),
        (None, [[0] * 19], r"seq_idx must be a tensor \[1, 20\]"),
        ([0, 7, 20], [[0] * 8 + [1] * 12], "contradict each other"),
    ],
)
def test_contradicting_collators(ends, numbers, match):
    described = {
        "cu_seq_lens_q": None if ends is None else torch.tensor(ends, dtype=torch.int32),
        "seq_idx": None if numbers is None else torch.tensor(numbers),
    }
    refused(match, rows_of_call, torch.nn.Module(), torch.zeros(1, TOKENS), described)


def test_a_mask_of_numbers_with_padding_and_what_contradicts_it():
    model, row = ra.patch_model(tiny_model("llama", "eager"), "window:4+1"), ids()
    mask = torch.tensor([[0] * 2 + [1] * 6 + [2] * 9 + [0] * 3])
    found = logits(model, row, attention_mask=mask)
    for kind in (torch.float32, torch.uint8):
        assert torch.equal(logits(model, row, attention_mask=mask.to(kind)), found)
    for start, stop in ((2, 8), (8, 17)):
        assert_alike(found[:, start:stop], logits(model, row[:, start:stop]))
    # One number in a row is one document.
    one = logits(model, row, attention_mask=(mask != 0).long())
    assert torch.equal(logits(model, row, attention_mask=255 * (mask != 0)), one)
    said = "position_ids of row 0 go from 7 to 8 at token 8, where a document begins"
    refused(said, logits, model, row, attention_mask=mask, position_ids=torch.arange(TOKENS)[None])
    said = r"packed rows \(by cu_seq_lens, seq_idx or the mask\) have no cache: pass use_cache=False"
    for cache in (ra.PatternCache(model), DynamicCache()):
        refused(said, model, row, attention_mask=mask, **cache_argument(cache))


def test_a_collator_that_contradicts_the_mask():
    mask, ends = torch.ones(1, TOKENS, dtype=torch.long), torch.tensor([0, 7, TOKENS], dtype=torch.int32)
    mask[0, :3] = 0
    said = r"cu_seq_lens and the padding of attention_mask contradict each other: they describe .*\(0, 7\).* and .*\(3, 20\)"
    refused(said, logits, tiny_model("llama", "ring_dilated"), ids(), attention_mask=mask, cu_seq_lens_q=ends)


# ---- on a ring


def test_a_copied_mask_of_a_sharded_model():
    """Accelerate copies masks to the devices of layers."""

    def copied(module, args, kwargs):
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}

    def work(ring, model):
        model.model.layers[1].register_forward_pre_hook(copied, with_kwargs=True)
        return logits(model, ids())

    assert_on_ranks(work, llama, logits(ra.patch_model(llama()), ids()))


def test_a_window_longer_than_any_row_shows_all_of_it():
    models = [tiny_model("mistral", name, sliding_window=2**40) for name in ("eager", "ring_dilated")]
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    assert_alike(*(logits(model, ids(), attention_mask=mask) for model in models))
