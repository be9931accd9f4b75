"""decoder_layer and decoder_layers: to the bit what the separate ops give, nothing written by a wrong call."""

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


# --------------------------------------------------------------------------------------------- all layers in one call

LAYER = ("norm_1", "qkv", "out", "norm_2", "gate", "up", "down")  # what is a layer's own


def problem_of_layers(kind, dtype, n=3, packed=()):
    """Arguments of decoder_layers; the weights of the layers in `packed` are packed."""
    made = [problem(kind, dtype, i in packed) for i in range(n)]
    tensors, options = made[0]
    caches = [[tensors[which] for tensors, _ in made] for which in (1, 2)]
    layers = [{name: options[name] for name in LAYER if name in options} for _, options in made]
    shared = {name: value for name, value in options.items() if name not in LAYER}
    return (tensors[0], *caches, *tensors[3:]), {"layers": layers, **shared}


def layer_by_layer(x, key_caches, value_caches, *step, layers, **options):
    for layer, key_cache, value_cache in zip(layers, key_caches, value_caches, strict=True):
        x = attn_ext.decoder_layer(x, key_cache, value_cache, *step, **layer, **options)
    return x


def copied(arguments):
    return [[t.clone() for t in a] if isinstance(a, list) else a.clone() for a in arguments]


def assert_same_caches(ours, theirs):
    for name, a, b in zip(("key_cache", "value_cache"), ours[1:3], theirs[1:3], strict=True):
        for i, (cache, other) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(cache, other, f"{name} of layer {i}")


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_a_call_each_to_the_bit(kind, dtype):
    tensors, options = problem_of_layers(kind, dtype, packed=[1])
    others = copied(tensors)
    out = attn_ext.decoder_layers(*tensors, **options)
    assert out.is_contiguous()
    assert_same_bits(out, layer_by_layer(*others, **options))
    assert_same_caches(tensors, others)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_layers_in_every_mode(mode, dtype):
    """Also with caches that are parts of one tensor, as PagedKVCache has them, and versions that count the writes."""
    tensors, options = problem_of_layers("llama", dtype)
    others = copied(tensors)
    storage = [torch.stack(caches) for caches in tensors[1:3]]
    versions = [s._version for s in storage]
    with mode():
        out = attn_ext.decoder_layers(tensors[0], *(list(s) for s in storage), *tensors[3:], **options)
    assert_same_bits(out, layer_by_layer(*others, **options))
    assert_same_caches([None, *storage], others)
    assert all(s._version > version for s, version in zip(storage, versions, strict=True))


def test_layers_without_rows(dtype):
    tensors, options = problem_of_layers("gpt", dtype)
    x, key_caches, value_caches, slots, table, lens, cu = tensors
    before = copied(tensors)
    out = attn_ext.decoder_layers(x[:0], key_caches, value_caches, slots[:0], table[:0], lens[:0], cu[:1], **options)
    assert out.shape == (0, C)
    assert_same_caches(tensors, before)


def test_layers_hold_on_to_nothing():
    tensors, options = problem_of_layers("gpt", torch.float32)
    held = tensors[0], tensors[1][1], *options["layers"][1]["up"]

    def uses():
        return [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in held]

    before = uses()
    attn_ext.decoder_layers(*tensors, **options)
    with pytest.raises(RuntimeError, match="eps"):
        attn_ext.decoder_layers(*tensors, **options | {"eps": -1.0})
    assert uses() == before


LAYERS_NAMES = ("x", "key_caches", "value_caches", *NAMES[3:])


@pytest.mark.parametrize(("wrong", "argument"), BAD, ids=[f"{i}-{argument}" for i, (_, argument) in enumerate(BAD)])
def test_a_wrong_argument_of_a_later_layer_is_refused_before_the_first_writes(wrong, argument):
    tensors, options = problem_of_layers("gpt", torch.float32)
    for layer in options["layers"]:
        layer["gate"] = (randn(INNER, C), None)
    own = {name: value for name, value in wrong.items() if name in LAYER}
    options["layers"][2] |= own
    arguments = dict(zip(LAYERS_NAMES, tensors, strict=True)) | options
    arguments |= {name: value for name, value in wrong.items() if name not in LAYER}
    before = copied(tensors)
    of_layer = " of layer 2" if wrong.keys() <= set(LAYER) else ""
    with pytest.raises(RuntimeError, match=f"^decoder_layers: ({argument}).*{of_layer} must .*, got "):
        attn_ext.decoder_layers(**arguments)
    assert_same_caches(tensors, before)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t, _: t.update(key_caches=[], value_caches=[], layers=[]), "key_caches must .*, got no layer"),
        (lambda t, _: t["value_caches"].pop(), r"value_caches must be as many as key_caches \(3\), got 2"),
        (lambda t, _: t["layers"].pop(), r"weights must be 14 for each of key_caches \(42\), got 28"),
        (lambda t, _: t["layers"][2].update(qkv=(None, None)), "qkv of layer 2 must have a weight, got none"),
        (
            lambda t, each: each(t, 1, lambda cache: cache[1:]),
            "key_cache of layer 1 must have the shape of that of layer 0",
        ),
        (
            lambda t, each: each(t, 1, lambda cache: cache.half()),
            "x, key_cache and value_cache of layer 1 must have the same",
        ),
        (
            lambda t, each: each(t, 2, lambda cache: cache[:1].expand(10, 4, HKV, D)),
            "key_cache of layer 2 must not overlap",
        ),
        (lambda t, _: t["value_caches"].__setitem__(1, t["key_caches"][1]), "value_cache of layer 1 must not overlap"),
    ],
)
def test_wrong_lists_are_refused(change, error):
    tensors, options = problem_of_layers("llama", torch.float32)
    arguments = dict(zip(LAYERS_NAMES, tensors, strict=True)) | options
    before, kept = copied(tensors), [list(a) if isinstance(a, list) else a for a in tensors]

    def change_caches(arguments, layer, function):
        for name in ("key_caches", "value_caches"):
            arguments[name] = [function(c) if i == layer else c for i, c in enumerate(arguments[name])]

    change(arguments, change_caches)
    with pytest.raises(RuntimeError, match=f"^decoder_layers: {error}"):
        attn_ext.decoder_layers(**arguments)
    assert_same_caches(kept, before)


@pytest.mark.parametrize(
    ("choose", "name"),
    [
        (lambda tensors, options: tensors[0], "x"),
        (lambda tensors, options: tensors[2][1], r"value_caches\[1\]"),
        (lambda tensors, options: options["layers"][2]["down"][1], "down_bias of layer 2"),
    ],
)
def test_gradients_of_a_listed_argument_are_refused(choose, name):
    tensors, options = problem_of_layers("gpt", torch.float32)
    choose(tensors, options).requires_grad_()
    with pytest.raises(RuntimeError, match=f"^decoder_layers: {name} must not require grad"):
        attn_ext.decoder_layers(*tensors, **options)
    with torch.no_grad():
        attn_ext.decoder_layers(*tensors, **options)


@pytest.mark.parametrize("packed", [(), (1,)], ids=["plain", "packed"])
def test_autocast_casts_what_is_listed(packed):
    tensors, options = problem_of_layers("gpt", torch.float32, packed=packed)
    tensors = (tensors[0], *([c.bfloat16() for c in caches] for caches in tensors[1:3]), *tensors[3:])
    others = copied(tensors)
    with torch.autocast("cpu", torch.bfloat16):
        out = attn_ext.decoder_layers(*tensors, **options)
        assert out.dtype == torch.bfloat16
        assert_same_bits(out, layer_by_layer(*others, **options))
    assert_same_caches(tensors, others)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_layers(compiler):
    tensors, options = problem_of_layers("llama", torch.float32)
    others = copied(tensors)
    compiled = torch.compile(attn_ext.decoder_layers, fullgraph=True, backend=compiler)
    assert_same_bits(compiled(*tensors, **options), attn_ext.decoder_layers(*others, **options))
    assert_same_caches(tensors, others)
