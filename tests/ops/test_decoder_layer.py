"""decoder_layer: to the bit what the separate ops give, as accurate as torch, and nothing written by a wrong call."""

import pytest
import torch
from problems import new_cache
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

H, HKV, D, C, INNER = 4, 2, 16, 64, 96
PRODUCTS = {"qkv": ((H + 2 * HKV) * D, C), "out": (C, H * D), "up": (INNER, C), "down": (C, INNER)}
LENGTHS, QUERIES = [9, 5, 17], [1, 5, 3]  # the second is a whole prompt, the third a chunk

# gated MLP, norm, activation, biases, rotation, window
KINDS = {"llama": (True, "rms_norm", "silu", False, True, -1), "gpt": (False, "layer_norm", "gelu", True, False, -1),
         "mixed": (True, "layer_norm", "gelu_tanh", True, True, 6)}  # fmt: skip


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def problem(kind, dtype, packed=False):
    """Arguments of decoder_layer: three sequences in a cache that is full of keys and values."""
    gated, norm, activation, has_bias, rotates, window = KINDS[kind]

    def affine(shape, centre=0.0):
        bias = torch.randn(shape[0]).to(dtype) if has_bias else None
        return (centre + torch.randn(shape) / shape[-1] ** 0.5).to(dtype), bias

    shapes = PRODUCTS | ({"gate": (INNER, C)} if gated else {})
    weights = {name: affine(shape) for name, shape in shapes.items()}
    if packed:
        weights = {name: (attn_ext.pack_weight(w), b) for name, (w, b) in weights.items()}
    weights |= {name: affine((C,), 1.0) for name in ("norm_1", "norm_2")}
    caches = [torch.randn(cache.shape).to(dtype) for cache in new_cache(10, 4, HKV, D, dtype, fill=0.0)]
    table = ints([[3, 0, 7, -1, -1], [1, 6, -1, -1, -1], [2, 4, 5, 8, 9]])
    positions = [p for length, n in zip(LENGTHS, QUERIES, strict=True) for p in range(length - n, length)]
    rows = [b for b, n in enumerate(QUERIES) for _ in range(n)]
    slots = [int(table[b, p // 4]) * 4 + p % 4 for b, p in zip(rows, positions, strict=True)]
    slots[3] = -1
    rope = (torch.randn(20, D // 2), torch.randn(20, D // 2), ints(positions, torch.int64)) if rotates else None
    tensors = (torch.randn(9, C).to(dtype), *caches, ints(slots, torch.int64), table, ints(LENGTHS), ints([0, 1, 6, 9]))
    options = {"n_heads": H, "n_kv_heads": HKV, "norm": norm, "eps": 1e-5, "activation": activation,
               "window_left": window, "rope": rope}  # fmt: skip
    return tensors, weights | options


def separately(x, key_cache, value_cache, slots, table, lens, cu, *, norm_1, qkv, out, norm_2, up, down,
               gate=(None, None), norm, eps, activation, window_left, rope, **heads):  # fmt: skip
    def normed(y, weight, bias):
        return attn_ext.rms_norm(y, weight, eps) if bias is None else attn_ext.layer_norm(y, weight, bias, eps)

    q = attn_ext.qkv_projection_to_cache(normed(x, *norm_1), *qkv, key_cache, value_cache, slots, rope=rope, **heads)
    y = attn_ext.paged_attention(q, key_cache, value_cache, table, lens, cu_seqlens_q=cu, window=(window_left, -1))
    x = attn_ext.linear(y.flatten(-2), *out, residual=x)
    y = normed(x, *norm_2)
    if gate[0] is None:
        h = attn_ext.linear(y, *up, activation=activation)
    else:
        h = attn_ext.linear(y, *up, multiply=attn_ext.linear(y, *gate, activation=activation))
    return attn_ext.linear(h, *down, residual=x)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_separate_ops_to_the_bit(kind, packed, dtype):
    tensors, options = problem(kind, dtype, packed)
    others = [t.clone() for t in tensors]
    assert_same_bits(attn_ext.decoder_layer(*tensors, **options), separately(*others, **options))
    for name, ours, theirs in zip(("key_cache", "value_cache"), tensors[1:3], others[1:3], strict=True):
        assert_same_bits(ours, theirs, name)


@pytest.mark.parametrize("kind", KINDS)
def test_accuracy(kind, dtype):
    tensors, options = problem(kind, dtype)
    results = []
    for precision in (torch.float64, dtype):
        with reference.precision(precision):
            results.append(reference.decoder_layer(*[t.clone() for t in tensors], **options))
    out = attn_ext.decoder_layer(*tensors, **options)
    assert out.shape == (9, C) and out.dtype == dtype and out.is_contiguous()
    # The parts are rounded to the dtype in between, so that the error of a few roundings is left.
    assert_as_accurate_as_torch(out, *results, terms=64 * results[0].abs().max().item())


def test_no_rows(dtype):
    tensors, options = problem("llama", dtype)
    x, key_cache, value_cache, slots, table, lens, cu = tensors
    options["rope"] = (*options["rope"][:2], ints([], torch.int64))
    out = attn_ext.decoder_layer(x[:0], key_cache, value_cache, slots[:0], table[:0], lens[:0], cu[:1], **options)
    assert out.shape == (0, C)


def randn(*shape):
    return torch.randn(shape)


BAD = [
    ({"norm": "batch_norm"}, "norm"), ({"activation": "relu"}, "activation"), ({"eps": -1.0}, "eps"),
    ({"norm": "rms_norm", "norm_2": (randn(C), randn(C))}, "norm_1 and norm_2"),
    ({"norm_1": (randn(C + 1), None)}, "norm_1"), ({"norm_2": (randn(C), randn(1))}, "norm_2's bias"),
    ({"norm_2": (randn(C).double(), None)}, "x and norm_2"), ({"qkv": (randn(7 * D, C), None)}, "qkv"),
    ({"qkv": (randn(8 * D, C), randn(3))}, "qkv's bias"), ({"out": (randn(C, H * D + 1), None)}, "out"),
    ({"out": (randn(C + 1, H * D), None)}, "out"), ({"out": (randn(C, H * D).half(), None)}, "x and out"),
    ({"up": (randn(INNER, C + 1), None)}, "up"), ({"gate": (randn(INNER + 1, C), None)}, "gate"),
    ({"gate": (None, randn(INNER))}, "gate"),
    ({"down": (randn(C, INNER + 16), None)}, "down"), ({"down": (randn(C, INNER), randn(INNER))}, "down's bias"),
    ({"down": (attn_ext.pack_weight(randn(C, INNER))[::2], None)}, "down"), ({"n_heads": 3}, "the number of query"),
    ({"window_left": -2}, "window"), ({"slot_mapping": ints(range(8), torch.int64)}, "slot_mapping"),
    ({"seq_lens": ints([9, 5, 21])}, r"seq_lens\[2\]"), ({"cu_seqlens_q": ints([0, 1, 6, 8])}, "cu_seqlens_q"),
    ({"block_table": ints([[10, 0, 7, 0, 0], [1, 6, 0, 0, 0], [2, 4, 5, 8, 9]])}, r"block_table\[0\]\[0\]"),
    ({"max_seqlen_q": 4}, "max_seqlen_q"), ({"rope": (randn(20, 3), randn(20, 3), ints(range(9)))}, "cos"),
]  # fmt: skip
NAMES = ("x", "key_cache", "value_cache", "slot_mapping", "block_table", "seq_lens", "cu_seqlens_q")


@pytest.mark.parametrize(("wrong", "argument"), BAD, ids=[f"{i}-{argument}" for i, (_, argument) in enumerate(BAD)])
def test_a_wrong_argument_is_refused_before_anything_is_written(wrong, argument):
    tensors, options = problem("gpt", torch.float32)
    options |= {"gate": (randn(INNER, C), None)}
    arguments = dict(zip(NAMES, tensors, strict=True)) | options | wrong
    before = [cache.clone() for cache in tensors[1:3]]
    with pytest.raises(RuntimeError, match=f"^decoder_layer: ({argument}).* must .*, got "):
        attn_ext.decoder_layer(**arguments)
    for cache, kept in zip(tensors[1:3], before, strict=True):
        assert_same_bits(cache, kept)
