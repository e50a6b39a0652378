"""The signatures of torch's attention operators for CUDA, in releases that calls must fit: texts of native_functions.yaml."""

from torch._C import parse_schema

_TENSORS = "Tensor query, Tensor key, Tensor value"
_PACKED = "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal"
_WINDOW = "*, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None"
_THREE = "(Tensor, Tensor, Tensor)"
_FLASH = (
    f"_flash_attention_forward({_TENSORS}, Tensor? cum_seq_q, Tensor? cum_seq_k, {_PACKED}, bool return_debug_mask, {_WINDOW}, "
    "Tensor? seqused_k=None, Tensor? alibi_slopes=None{}) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, "
    "Tensor unused, Tensor debug_attn_mask)"
)
_OTHERS = (
    f"_flash_attention_backward(Tensor grad_out, {_TENSORS}, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
    f"{_PACKED}, Tensor rng_state, Tensor unused, {_WINDOW}) -> {_THREE}",
    f"_scaled_dot_product_efficient_attention({_TENSORS}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None) "
    "-> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    f"_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, {_TENSORS}, Tensor attn_bias, Tensor out, "
    "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, "
    "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
    f"_scaled_dot_product_cudnn_attention({_TENSORS}, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0.0, "
    "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
    "Tensor debug_attn_mask)",
    f"_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, {_TENSORS}, Tensor out, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, "
    f"{_PACKED}, *, float? scale=None) -> {_THREE}",
)
_TEXTS = {
    "2.11": (_FLASH.format(""), *_OTHERS),
    "2.13": (_FLASH.format(", Tensor? block_table=None, int? num_splits=None"), *_OTHERS),
}
#: By release, and by the operator's name.
SCHEMAS = {
    release: {
        schema.name.removeprefix("aten::"): schema for schema in (parse_schema(f"aten::{text}") for text in texts)
    }
    for release, texts in _TEXTS.items()
}


def bound(schema, args, kwargs):
    """The arguments by the names of a schema, which has all of them, in this order and as keywords only if they are."""
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) <= len(positional), f"{schema.name}: too many arguments"
    given = dict(zip(positional, args, strict=False)) | kwargs
    assert len(given) == len(args) + len(kwargs), f"{schema.name}: an argument twice"
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    assert needed <= given.keys() <= {argument.name for argument in schema.arguments}, f"{schema.name} got {[*given]}"
    return given
