"""The attention operators of torch for CUDA, without a GPU: the demands on their arguments, and their results.

The demands are the checks of torch's sources before they start a kernel, and the assumptions of a kernel: flash_api.cpp
for FlashAttention-2, attention.cu, attention_backward.cu, kernel_forward.h and kernel_backward.h for the efficient kernels.
"""

import torch
from torch.overrides import TorchFunctionMode

from tests.support.schemas import SCHEMAS, bound

HALVES = (torch.bfloat16, torch.float16)


class WithoutDeviceGuard(TorchFunctionMode):
    """Has operators do what torch's Python methods do after they have set the device: builds for CPUs cannot set one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return part_of(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            return torch.ops.aten.copy_(part_of(x, index), value)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if func is torch.Tensor.contiguous and not kwargs:
            [x] = args
            return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def part_of(x, index):
    """x[index], for integers, slices, None and an ellipsis, or for a tensor."""
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index(x, [index])
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        here = index.index(Ellipsis)
        missing = x.ndim - sum(item is not None for item in index) + 1
        index = index[:here] + (slice(None),) * missing + index[here + 1 :]
    dim = 0
    for item in index:
        if item is None:
            x = x.unsqueeze(dim)
        elif isinstance(item, slice):
            x = torch.ops.aten.slice(x, dim, item.start, item.stop, 1 if item.step is None else item.step)
        else:
            x, dim = x.select(dim, item), dim - 1
        dim += 1
    return x


class CheckedOperators:
    """Operators of torch.ops.aten that are handed on to `played_by` once their arguments are known to be right.

    `calls` has the name and the arguments by name of each call. With `one_mask`, a bias is there once for all tiles and heads.
    """

    def __init__(self, played_by=torch.ops.aten, dtypes=HALVES, one_mask=True):
        self.played_by, self.dtypes, self.calls, self.programs = played_by, dtypes, [], {}
        self.one_mask = one_mask

    def __getattr__(self, name):
        def call(*args, **kwargs):
            [*_, given] = [bound(schemas[name], args, kwargs) for schemas in SCHEMAS.values()]
            self.calls.append((name, given))
            check = check_flash if name.startswith("_flash") else check_cudnn if "cudnn" in name else check_efficient
            check(given, self.dtypes)
            bias = given.get("attn_bias")
            if bias is not None and self.one_mask:
                assert not any(stride for stride, size in zip(bias.stride()[:2], bias.shape[:2]) if size > 1)
            if "cudnn" in name and "grad_out" in given:
                program, strides = program_of(given)
                assert self.programs.setdefault(program, strides) == strides, "cuDNN would read out or dout wrongly"
            return getattr(self.played_by, name)(*args, **kwargs)

        return call


def check_rows(tensors, dtypes):
    """Tensors of one device and one of `dtypes`, whose rows are contiguous; all that is read at once, 16 bytes, is aligned."""
    assert {(x.device, x.dtype) for x in tensors} == {(tensors[0].device, tensors[0].dtype)}
    assert tensors[0].dtype in dtypes
    for x in tensors:
        assert x.stride(-1) == 1
        for start in (x.storage_offset(), *x.stride()[:-1]):
            assert start * x.element_size() % 16 == 0, f"rows begin at multiples of {start} numbers of {x.dtype}"


def check_flash(given, dtypes):
    """q, k, v [B, L, H, D], as FlashAttention-2 takes them, or [L, H, D] of packed sequences; and the window."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    check_rows((q, k, v), dtypes)
    assert k.shape == v.shape
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    check_sequences(given, q, k)
    assert given["dropout_p"] == 0
    assert ("window_size_left" in given) == ("window_size_right" in given)
    if "window_size_left" in given:
        # To the operator, a negative window means no window, and a causal call sets a window itself.
        assert min(given["window_size_left"], given["window_size_right"]) >= 0
        assert given["window_size_left"] < given["max_k"]
        assert not given["is_causal"]
    if given["is_causal"]:
        assert given["max_q"] == given["max_k"]
    if "grad_out" in given:
        check_backward(
            given, dtypes, given["grad_out"], q.shape, q.transpose(-2, -3).shape[:-1], ("rng_state", "unused")
        )
    else:
        assert not given["return_debug_mask"]  # which is for dropout


def check_sequences(given, q, k):
    """How long sequences are, and where they end if they are packed."""
    ends = given["cum_seq_q"], given["cum_seq_k"]
    if ends[0] is None or ends[1] is None:  # sequences of one length
        assert ends == (None, None)
        assert q.ndim == k.ndim == 4
        assert q.shape[0] == k.shape[0]
        assert (given["max_q"], given["max_k"]) == (q.shape[1], k.shape[1])
        return
    assert q.ndim == k.ndim == 3
    assert ends[0].shape == ends[1].shape
    for x in ends:
        assert (x.dtype, x.device, x.ndim) == (torch.int32, q.device, 1)
        assert x.is_contiguous()


def check_backward(given, dtypes, dout, shape, lse_shape, of_dropout):
    """The output and its gradient, of this shape; kernels compute their address of a row's log-sum-exp from `lse_shape`."""
    q, out, lse = (given[name] for name in ("query", "out", "logsumexp"))
    check_rows((q, out, dout), dtypes)
    assert out.shape == dout.shape == shape
    assert lse.shape == lse_shape
    assert lse.is_contiguous()
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert {lse.device, *(given[name].device for name in of_dropout)} == {q.device}


def check_efficient(given, dtypes):
    """q, k, v [B, H, L, D] and the bias, as the efficient operators take them."""
    q, k, v, bias = (given[name] for name in ("query", "key", "value", "attn_bias"))
    check_rows((q, k, v), dtypes)
    assert q.shape[:2] == k.shape[:2] == v.shape[:2]
    assert k.shape[2] == v.shape[2]
    assert q.shape[3] == k.shape[3]
    assert q.shape[3] % 8 == v.shape[3] % 8 == 0
    assert given["dropout_p"] == 0
    if bias is not None:
        check_rows((q, bias), dtypes)
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(2) % 16 == 0
        assert not given["is_causal"]
    if "grad_out_" not in given:
        assert given["compute_log_sumexp"]
        return
    padded_to_32 = (*q.shape[:2], -(-q.shape[2] // 32) * 32)
    shape = (*q.shape[:3], v.shape[3])
    check_backward(given, dtypes, given["grad_out_"], shape, padded_to_32, ("philox_seed", "philox_offset"))
    # o_strideM() of kernel_backward.h: rows of out are as far apart as all heads of a token are wide.
    assert shape[2] == 1 or given["out"].stride(2) == shape[1] * shape[3]
    assert list(given["grad_input_mask"]) == [True, True, True, False]


def check_cudnn(given, dtypes):
    """q, k, v [B, H, L, D] as cuDNN takes them (MHA.cpp, check_cudnn_tensor_shapes of sdp_utils.cpp)."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    check_rows((q, k, v), dtypes)
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert k.shape[1:3] == v.shape[1:3]
    assert q.shape[1] % k.shape[1] == 0
    assert q.shape[3] == k.shape[3]
    assert all(x.shape[3] % 8 == 0 and x.shape[3] <= 128 for x in (q, v))
    assert given["attn_bias"] is None
    assert given["dropout_p"] == 0
    assert q.shape[2] == k.shape[2] or not given["is_causal"]
    if "grad_out" not in given:
        assert given["compute_log_sumexp"]
        assert not given["return_debug_mask"]
        return
    assert (given["cum_seq_q"], given["cum_seq_k"], given["max_q"], given["max_k"]) == (None, None, *lengths(q, k))
    shape = (*q.shape[:3], v.shape[3])
    check_backward(given, dtypes, given["grad_out"], shape, (*q.shape[:3], 1), ("philox_seed", "philox_offset"))


def lengths(q, k):
    return q.shape[2], k.shape[2]


def program_of(given):
    """By what torch 2.11 finds the program of a backward pass, and the strides that it is made for."""
    key = [(given[name].shape, given[name].stride()) for name in ("query", "key", "value")]
    # The stride of a single row or head is not read.
    strides = [
        [stride for stride, size in zip(given[name].stride(), given[name].shape, strict=True) if size > 1]
        for name in ("out", "grad_out")
    ]
    return (*key, given["is_causal"]), strides


class SilentOperators:
    """Operators of FlashAttention-2 and cuDNN that return zeros, and launches; each is one operation for whoever counts."""

    library = torch.library.Library("silent", "DEF")
    library.define("forward(Tensor q, Tensor v) -> (Tensor, Tensor)")
    library.define("backward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)")
    library.define("launch(Tensor items) -> ()")
    library.define("cudnn(Tensor q, Tensor v) -> (Tensor, Tensor)")

    @staticmethod
    def _flash_attention_forward(q, k, v, *others, **window):
        return torch.ops.silent.forward(q, v)

    @staticmethod
    def _flash_attention_backward(dout, q, k, v, *others, **window):
        return torch.ops.silent.backward(q, k, v)

    @staticmethod
    def _scaled_dot_product_cudnn_attention(q, k, v, *others, scale):
        return torch.ops.silent.cudnn(q, v)

    _scaled_dot_product_cudnn_attention_backward = _flash_attention_backward


def silent_forward(q, v):
    lse = q.new_zeros(q.transpose(-3, -2).shape[:-1], dtype=torch.float32)
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse


SilentOperators.library.impl("forward", silent_forward, "CPU")


def silent_cudnn(q, v):
    return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)


SilentOperators.library.impl("cudnn", silent_cudnn, "CPU")
SilentOperators.library.impl("launch", lambda items: None, "CPU")
SilentOperators.library.impl("backward", lambda *tensors: tuple(map(torch.zeros_like, tensors)), "CPU")


class FlashAttention2:
    """What FlashAttention-2 computes, with signatures of torch's, in plain math.

    With d = Lk - Lq, query i sees the keys i + d - left to i + d + right, each side only if it has a limit. A causal call has
    no limit on the left and a right of 0: the diagonal ends in the lower right corner.
    """

    @classmethod
    def _flash_attention_forward(
        cls, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
        window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        window = scale, is_causal, window_size_left, window_size_right
        if cum_seq_q is None:
            return *cls.forward(query, key, value, *window), None, None, None
        sequences = zip(
            parts(query, cum_seq_q, max_q), *(parts(x, cum_seq_k, max_k) for x in (key, value)), strict=True
        )
        outs, lses = zip(*(cls.forward(*sequence, *window) for sequence in sequences), strict=True)
        return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses], 1), None, None, None

    @classmethod
    def _flash_attention_backward(
        cls, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        window = scale, is_causal, window_size_left, window_size_right
        if cum_seq_q is None:
            return cls.backward(grad_out, query, key, value, out, logsumexp, *window)
        douts, queries, outs = (parts(x, cum_seq_q, max_q) for x in (grad_out, query, out))
        lses = [x.transpose(1, 2) for x in parts(logsumexp.transpose(0, 1), cum_seq_q, max_q)]
        keys, values = (parts(x, cum_seq_k, max_k) for x in (key, value))
        grads = [
            cls.backward(*sequence, *window) for sequence in zip(douts, queries, keys, values, outs, lses, strict=True)
        ]
        return tuple(torch.cat([x[0] for x in of_all]) for of_all in zip(*grads, strict=True))

    @staticmethod
    def forward(query, key, value, scale, *window):
        scores, v = scores_of(query, key, scale, *window), heads_of(value, query)
        lse = torch.logsumexp(scores, -1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ v
        return out.transpose(1, 2).contiguous(), lse

    @staticmethod
    def backward(grad_out, query, key, value, out, logsumexp, scale, *window):
        scores = scores_of(query, key, scale, *window)
        p = torch.exp(scores - logsumexp.unsqueeze(-1))
        dout, out, q = (x.transpose(1, 2) for x in (grad_out, out, query))
        ds = p * (dout @ heads_of(value, query).mT - (dout * out).sum(-1, keepdim=True)) * scale
        dk, dv = (x.unflatten(1, (key.shape[2], -1)).sum(2) for x in (ds.mT @ q, p.mT @ dout))
        return tuple(x.transpose(1, 2).contiguous() for x in (ds @ heads_of(key, query), dk, dv))


class CudnnAttention:
    """What cuDNN's attention computes, with signatures of torch's, in plain math."""

    def _scaled_dot_product_cudnn_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
        scale=None,
    ):  # fmt: skip
        by_token = [x.transpose(1, 2) for x in (query, key, value)]
        out, lse = FlashAttention2.forward(*by_token, scale, is_causal, None, None)
        return out.transpose(1, 2), lse.unsqueeze(-1), None, None, *lengths(query, key), None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        by_token = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
        grads = FlashAttention2.backward(*by_token, logsumexp.squeeze(-1), scale, is_causal, None, None)
        return tuple(x.transpose(1, 2) for x in grads)


class EfficientAttention:
    """The operators of the efficient kernel, played by the CPU's; they have no grouped heads."""

    cpu = torch.ops.aten

    @classmethod
    def _scaled_dot_product_efficient_attention(cls, q, k, v, bias, compute_lse, dropout, causal, scale):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        forward = cls.cpu._scaled_dot_product_flash_attention_for_cpu
        return *forward(q, k, v, dropout, causal, attn_mask=bias, scale=scale), None, None

    @classmethod
    def _scaled_dot_product_efficient_attention_backward(
        cls, dout, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, scale
    ):
        assert q.shape[1] == k.shape[1] == v.shape[1]
        assert lse.shape[-1] % 32 == 0
        lse = lse[..., : q.shape[2]].contiguous()
        # The kernel finds the rows of out by the sizes of out, not by its stride (o_strideM() of kernel_backward.h).
        row_stride = out.shape[1] * out.shape[3]
        out = out.as_strided(out.shape, (*out.stride()[:2], row_stride, 1), out.storage_offset())
        backward = cls.cpu._scaled_dot_product_flash_attention_for_cpu_backward
        return *backward(dout, q, k, v, out, lse, dropout, causal, attn_mask=bias, scale=scale), None


def parts(x, ends, longest):
    """The packed sequences of x [L, H, ...], each [1, L, H, ...]; `longest` is the length of the longest."""
    lengths = ends.diff().tolist()
    assert (ends[0], ends[-1]) == (0, len(x))
    assert 0 < min(lengths) <= max(lengths) == longest
    return [part.unsqueeze(0) for part in x.split(lengths)]


def heads_of(x, query):
    """x [B, L, Hkv, D] as [B, H, L, D]."""
    return x.transpose(1, 2).repeat_interleave(query.shape[2] // x.shape[2], 1)


def scores_of(query, key, scale, is_causal, left, right):
    """Scores [B, H, Lq, Lk], of which those that the window hides are -inf."""
    right = 0 if is_causal else right
    diagonal = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1]
    keys = torch.arange(key.shape[1])
    hidden = torch.zeros(query.shape[1], key.shape[1], dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= keys < diagonal - left
    if right is not None and right >= 0:
        hidden |= keys > diagonal + right
    return (query.transpose(1, 2) @ heads_of(key, query).mT * scale).masked_fill(hidden, -torch.inf)
