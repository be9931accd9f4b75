"""The ops as torch sees them: schemas, fake kernels, torch.compile without a graph break, torch.export."""

import re

import pytest
import torch
from problems import new_cache
from tolerance import assert_same_bits

import attn_ext

INT32 = torch.int32
OPS = torch.ops.attn_ext
NAMES = [
    "append_kv", "attention", "attention_varlen", "copy_blocks", "decoder_layer", "decoder_layers", "layer_norm",
    "linear", "masked_softmax", "merge_attention", "paged_attention", "qkv_projection", "qkv_projection_to_cache",
    "rms_norm",
]  # fmt: skip


def ints(*values):
    return torch.tensor(values, dtype=INT32)


def _attention_inputs():
    """Decode, prefill, grouped heads, views of a fused buffer, transposed, expanded, empty; every option."""
    randn = torch.randn
    qkv = randn(2, 17, 8, 16)
    options = {
        "causal": True, "scale": 0.3, "window_left": 5, "window_right": 0, "softcap": 3.0, "alibi_slopes": randn(4),
        "sinks": randn(4), "mask": torch.rand(17, 17) < 0.7, "bias": randn(2, 1, 1, 17),
    }  # fmt: skip
    return [
        ((randn(1, 1, 32, 128), randn(1, 1, 32, 128), randn(1, 1, 32, 128)), {}),
        ((randn(1, 17, 4, 16), randn(1, 17, 4, 16), randn(1, 17, 4, 16)), {"causal": True}),
        ((qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]), options),
        (tuple(randn(2, h, t, 16).transpose(1, 2) for h, t in ((4, 17), (2, 9), (2, 9))), {}),
        ((randn(1, 5, 4, 16), randn(1, 1, 1, 16).expand(1, 7, 4, 16), randn(1, 7, 4, 16)), {}),
        ((randn(0, 5, 4, 16), randn(0, 5, 4, 16), randn(0, 5, 4, 16)), {}),
        ((randn(2, 0, 4, 16), randn(2, 5, 4, 16), randn(2, 5, 4, 16)), {}),
        ((randn(2, 3, 4, 16), randn(2, 0, 4, 16), randn(2, 0, 4, 16)), {}),
        (tuple(randn(1, 5, 2, 8, dtype=torch.bfloat16) for _ in "qkv"), {}),
        (tuple(randn(1, 5, 2, 8, dtype=torch.float64) for _ in "qkv"), {}),
    ]  # fmt: skip


def _inputs() -> list[tuple[str, tuple, dict]]:
    """Arguments for opcheck: (op, args, kwargs), at least two of each op."""
    randn = torch.randn
    x, weight, bias = randn(3, 5, 16), randn(64, 16), randn(64)
    caches = new_cache(6, 4, 2, 8, torch.float32, fill=0.0)
    hnd = new_cache(6, 4, 2, 8, torch.float32, "HND", fill=0.0)
    both = new_cache(6, 4, 2, 8, torch.float32, "interleaved", fill=0.0)
    slots = torch.tensor([3, -1, 9])
    table, lens = ints(0, 5, 3, 2).reshape(2, 2), ints(7, 4)
    heads = {"n_heads": 4, "n_kv_heads": 2}
    rope = {"rope_cos": randn(7, 4), "rope_sin": randn(7, 4), "positions": torch.tensor([0, 6, 2])}
    q = randn(2, 3, 4, 8)
    lse = randn(2, 4, 3)
    layer = randn(16), None, weight, None, randn(16, 32), None, randn(16), None
    step = slots, table, lens, ints(0, 2, 3), 2
    plain = *layer, None, None, randn(32, 16), None, randn(16, 32), None
    gated = *layer, randn(32, 16), None, randn(32, 16), None, randn(16, 32), None
    more_caches = new_cache(6, 4, 2, 8, torch.float32, fill=0.0)
    options = {**heads, "norm": "layer_norm", "eps": 1e-5, "activation": "gelu"}
    llama = {**options, "norm": "rms_norm", "activation": "silu", "window_left": 3, **rope}
    return [
        ("linear", (x, weight), {}),
        ("linear", (x, weight, bias), {"activation": "gelu", "residual": randn(3, 5, 64)}),
        ("linear", (x, weight), {"activation": "silu", "multiply": randn(5, 3, 64).transpose(0, 1)}),
        ("linear", (x.transpose(0, 1), weight.T.contiguous().T), {}),
        ("linear", (randn(0, 16), weight), {}),
        ("linear", (x, attn_ext.pack_weight(weight), bias), {}),
        ("linear", (x.bfloat16(), attn_ext.pack_weight(weight.bfloat16())), {"activation": "silu"}),
        ("qkv_projection", (x, weight, bias), heads),
        ("qkv_projection", (randn(3, 0, 16), weight), heads),
        ("qkv_projection", (x, attn_ext.pack_weight(weight), bias), heads),
        ("qkv_projection_to_cache", (x[0, :3], attn_ext.pack_weight(weight), bias, *caches, slots), heads),
        *(("qkv_projection_to_cache", (x[0, :3], weight, bias, *c, slots), heads) for c in (caches, hnd)),
        ("qkv_projection_to_cache", (x[0, :3], weight, None, *both, slots), {**heads, **rope}),
        ("decoder_layer", (x[0, :3], *plain, *caches, *step), options),
        ("decoder_layer", (x[0, :3], *gated, *caches, *step), llama),
        ("decoder_layers", (x[0, :3], [*plain], caches[:1], caches[1:], *step), options),
        ("decoder_layers", (x[0, :3], [*plain, *gated], *([a, b] for a, b in zip(caches, more_caches, strict=True)),
                            *step), llama),
        ("rms_norm", (x, randn(16)), {}),
        ("rms_norm", (x.transpose(0, 1).bfloat16(), randn(16).bfloat16(), 1e-6), {}),
        ("rms_norm", (randn(0, 16), randn(16)), {}),
        ("layer_norm", (x, randn(16)), {"eps": 1e-3}),
        ("layer_norm", (x[:, ::2], randn(16), randn(32)[::2]), {}),
        ("layer_norm", (randn(3, 0, 16).double(), randn(16).double(), randn(16).double()), {}),
        ("masked_softmax", (randn(2, 3, 5, 7),), {"causal": True}),
        ("masked_softmax", (randn(5, 2, 7).transpose(0, 1), torch.rand(5, 7) < 0.5), {"scale": 0.5}),
        ("masked_softmax", (randn(0, 7), None), {}),
        *(("attention", args, kwargs) for args, kwargs in _attention_inputs()),
        ("attention_varlen", (randn(6, 4, 8), randn(9, 2, 8), randn(9, 2, 8), ints(0, 2, 6), ints(0, 5, 9)), {}),
        ("attention_varlen", (randn(0, 4, 8), randn(0, 2, 8), randn(0, 2, 8), ints(0, 0), ints(0, 0)),
         {"max_seqlen_q": 3, "max_seqlen_k": 4}),
        *(("paged_attention", (q, *c, table, lens), {}) for c in (caches, hnd, both)),
        ("paged_attention", (randn(6, 4, 8), *caches, table, lens), {"cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 4}),
        ("paged_attention", (randn(0, 3, 4, 8), *caches, table[:0], lens[:0]), {}),
        ("merge_attention", (q, lse, randn(2, 3, 4, 8), randn(2, 4, 3)), {}),
        ("merge_attention", (q.transpose(1, 2), lse.transpose(1, 2), q.transpose(1, 2), lse.transpose(1, 2)), {}),
        ("merge_attention", (q[0], lse[0], q[0], lse[0]), {}),
        *(("append_kv", (randn(3, 2, 8), randn(3, 2, 8), *c, slots), {}) for c in (caches, hnd, both)),
        ("append_kv", (randn(0, 2, 8), randn(0, 2, 8), *caches, slots[:0]), {}),
        ("copy_blocks", (*caches, torch.tensor([[0, 1], [1, 2]])), {}),
        ("copy_blocks", (*hnd, torch.zeros(0, 2, dtype=torch.int64)), {}),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(_inputs())), ids=lambda i: f"{i}-{_inputs()[i][0]}")
def test_H23_opcheck(number):
    """Schema, fake kernel, autograd registration and tracing with dynamic shapes agree with what the op does."""
    name, args, kwargs = _inputs()[number]
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


def _on_meta(value):
    if isinstance(value, list | tuple):
        return [_on_meta(entry) for entry in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("number", range(len(_inputs())), ids=lambda i: f"{i}-{_inputs()[i][0]}")
def test_H23_fake_results_have_the_layout_of_real_ones(number):
    """Shape, dtype and stride of every output, which opcheck compares as a whole, one by one; and on meta tensors."""
    name, args, kwargs = _inputs()[number]
    op = getattr(OPS, name).default
    real = op(*args, **kwargs)
    meta = op(
        *(_on_meta(a) for a in args),
        **{k: _on_meta(a) for k, a in kwargs.items()},
    )
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (real, meta)), strict=True)
    for r, m in pairs:
        if r is None:
            assert m is None
            continue
        assert (r.shape, r.dtype, r.stride()) == (m.shape, m.dtype, m.stride())
        assert m.device.type == "meta"


def test_every_op_is_checked():
    assert sorted({name for name, _, _ in _inputs()}) == NAMES
    assert sorted(name for name in dir(attn_ext.ops) if name in NAMES) == NAMES


def test_in_place_arguments_are_declared():
    """Exactly the caches are marked as written, in exactly the ops that write them."""
    for name in NAMES:
        schema = getattr(OPS, name).default._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if name == "decoder_layers":
            assert written == ["key_caches", "value_caches"], str(schema)
        else:
            writes = name in ("append_kv", "copy_blocks", "decoder_layer", "qkv_projection_to_cache")
            assert written == (["key_cache", "value_cache"] if writes else []), str(schema)
        assert all(r.alias_info is None for r in schema.returns), str(schema)


# ---------------------------------------------------------------------------------------------- torch.compile


def _layer(x, w_qkv, b_qkv, w_o, residual):
    """One attention layer through every op that needs no cache."""
    normed = attn_ext.layer_norm(attn_ext.rms_norm(x, w_qkv[0]), w_qkv[1], w_qkv[2])
    q, k, v = attn_ext.qkv_projection(normed, w_qkv, b_qkv, n_heads=4, n_kv_heads=2)
    cut = k.shape[1] // 2
    near = attn_ext.attention(q, k[:, cut:], v[:, cut:], causal=True, return_lse=True)
    far = attn_ext.attention(q, k[:, :cut], v[:, :cut], return_lse=True)
    out, _ = attn_ext.merge_attention(*near, *far)
    weights = attn_ext.masked_softmax(q.transpose(1, 2) @ q.transpose(1, 2).transpose(-1, -2), causal=True)
    gate = attn_ext.linear(out.flatten(-2), w_o)
    return attn_ext.linear(out.flatten(-2), w_o, activation="gelu_tanh", residual=residual, multiply=gate), weights


def _layer_inputs(tokens=6):
    return (
        torch.randn(2, tokens, 16),
        torch.randn(64, 16),
        torch.randn(64),
        torch.randn(16, 32),
        torch.randn(2, tokens, 16),
    )


def _varlen(q, k, v, cu):
    return attn_ext.attention_varlen(q, k, v, cu, cu, causal=True, window=(3, 0), softcap=2.0, return_lse=True)


def _cached(x, weight, key, value, key_cache, value_cache, table, lens):
    """H24: write, read, write again, copy, read again; then the projection writes, and attention reads."""
    attn_ext.append_kv(key, value, key_cache, value_cache, torch.tensor([0, 1, 2]))
    first = key_cache.sum() + value_cache.sum()
    attn_ext.append_kv(-key, value * 2, key_cache, value_cache, torch.tensor([1, 4, 5]))
    second = key_cache[0].clone()
    attn_ext.copy_blocks(key_cache, value_cache, torch.tensor([[0, 2], [1, 3]]))
    q = attn_ext.qkv_projection_to_cache(
        x, weight, None, key_cache, value_cache, torch.tensor([6, -1, 7]), n_heads=4, n_kv_heads=2
    )
    out = attn_ext.paged_attention(q[None], key_cache, value_cache, table, lens)
    return first, second, out


def _cache_inputs(part: str):
    """Caches that are graph inputs themselves, or parts of a bigger tensor."""
    if part == "whole":
        caches = new_cache(5, 4, 2, 8, torch.float32, fill=0.0)
    elif part == "interleaved":
        caches = torch.zeros(5, 2, 4, 2, 8).unbind(1)
    else:
        caches = torch.zeros(2, 3, 5, 4, 2, 8)[:, 1].unbind(0)
    x, weight = torch.randn(3, 16), torch.randn(64, 16)
    return x, weight, torch.randn(3, 2, 8), torch.randn(3, 2, 8), *caches, ints(2, 1)[None], ints(8)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_H24_compiled_cache_writes_happen_in_order(backend):
    """Caches as graph inputs, K and V in one buffer, and slices of a bigger tensor."""
    compiled = torch.compile(_cached, fullgraph=True, backend=backend)
    for part in ("whole", "slices") if backend == "inductor" else ("whole", "interleaved", "slices"):
        torch.manual_seed(1)
        expected_inputs = _cache_inputs(part)
        expected = _cached(*expected_inputs)
        torch.manual_seed(1)
        inputs = _cache_inputs(part)
        for got, e in zip(compiled(*inputs), expected, strict=True):
            # inductor may sum and project around the ops in another order
            torch.testing.assert_close(got, e)
        assert_same_bits(inputs[4], expected_inputs[4], f"{part}: key_cache")
        assert_same_bits(inputs[5], expected_inputs[5], f"{part}: value_cache")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layer(backend):
    """All other ops in one graph, without a break."""
    inputs = _layer_inputs()
    compiled = torch.compile(_layer, fullgraph=True, backend=backend)
    for got, expected in zip(compiled(*inputs), _layer(*inputs), strict=True):
        torch.testing.assert_close(got, expected)
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    compiled = torch.compile(_varlen, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v, ints(0, 2, 9)), _varlen(q, k, v, ints(0, 2, 9)), strict=True):
        assert_same_bits(got, expected)


def test_compiled_with_dynamic_lengths():
    """One graph for all lengths."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(_layer, fullgraph=True, dynamic=True, backend=count)
    for tokens in (6, 7, 33, 130):
        inputs = _layer_inputs(tokens)
        for got, expected in zip(compiled(*inputs), _layer(*inputs), strict=True):
            assert_same_bits(got, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_under_autocast(dtype):
    inputs = _layer_inputs()

    def layer(*args):
        with torch.autocast("cpu", dtype):
            return _layer(*args)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*inputs), layer(*inputs), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


def test_compiled_error_is_the_eager_one():
    """A wrong argument fails with the same line while compiling."""
    q, k = torch.randn(1, 3, 3, 8), torch.randn(1, 3, 2, 8)
    with pytest.raises(Exception, match=re.escape("attention: the number of query heads must be")):
        torch.compile(attn_ext.attention, fullgraph=True, backend="aot_eager")(q, k, k)


# ----------------------------------------------------------------------------------------------- torch.export


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.randn(64, 16))

    def forward(self, x):
        q, k, v = attn_ext.qkv_projection(x, self.weight, n_heads=4, n_kv_heads=2)
        return attn_ext.attention(q, k, v, causal=True)


class CachedLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.randn(64, 16))
        self.key_cache = torch.nn.Buffer(torch.zeros(4, 4, 2, 8))
        self.value_cache = torch.nn.Buffer(torch.zeros(4, 4, 2, 8))

    def forward(self, x, slots, table, lens):
        q = attn_ext.qkv_projection_to_cache(
            x, self.weight, None, self.key_cache, self.value_cache, slots, n_heads=4, n_kv_heads=2
        )
        return attn_ext.paged_attention(q[None], self.key_cache, self.value_cache, table, lens)


def test_export_with_dynamic_shapes(tmp_path):
    """Exported once, saved and loaded, it runs for other batch sizes and lengths."""
    layer = Layer()
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 6, 16),), dynamic_shapes={"x": {0: batch, 1: tokens}})
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for shape in ((2, 6, 16), (3, 70, 16), (1, 1, 16)):
        x = torch.randn(shape)
        assert_same_bits(loaded(x), layer(x))
    targets = [str(node.target) for node in program.graph.nodes]
    assert "attn_ext.qkv_projection.default" in targets and "attn_ext.attention.default" in targets


def test_export_of_cache_writes():
    """The written caches are buffers that the exported program updates."""
    layer = CachedLayer()
    args = torch.randn(3, 16), torch.tensor([8, 9, 10]), ints(2)[None], ints(3)
    program = torch.export.export(layer, args).run_decompositions()
    assert set(program.graph_signature.buffers_to_mutate.values()) == {"key_cache", "value_cache"}
    exported = program.module()
    assert_same_bits(exported(*args), layer(*args))
    assert_same_bits(exported.get_buffer("key_cache"), layer.key_cache)
    assert layer.key_cache[2, :3].any()


# ------------------------------------------------------------------------------------------------- other modes


def test_vmap_is_refused_not_wrong():
    """There is no batching rule: vmap raises or loops, and if it returns, it is right."""
    q = torch.randn(3, 1, 5, 2, 8)
    expected = torch.stack([attn_ext.attention(x, x, x) for x in q])
    try:
        out = torch.vmap(lambda x: attn_ext.attention(x, x, x))(q)
    except RuntimeError:
        return
    torch.testing.assert_close(out, expected)


def test_profiler_sees_the_ops():
    q = torch.randn(1, 3, 2, 8)
    with torch.profiler.profile() as profile:
        attn_ext.attention(q, q, q)
    assert "attn_ext::attention" in {event.key for event in profile.key_averages()}


def test_mutation_is_seen_by_version_counters():
    """Autograd's check for tensors changed after they were saved covers writes of the ops."""
    k, v = new_cache(2, 4, 1, 8, torch.float32, fill=0.0)
    versions = k._version, v._version
    attn_ext.append_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), k, v, torch.tensor([1]))
    assert k._version > versions[0] and v._version > versions[1]
    versions = k._version, v._version
    attn_ext.copy_blocks(k, v, [(0, 1)])
    assert k._version > versions[0] and v._version > versions[1]


# ------------------------------------------------------------------------------------- derivatives, version counters


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.vjp, torch.func.jacfwd, torch.func.grad])
def test_function_transforms_are_refused(transform):
    """No derivative in silence, in forward mode either."""
    q = torch.randn(1, 3, 2, 8)

    def loss(x):
        return attn_ext.attention(x, x, x).sum()

    with pytest.raises(RuntimeError, match="^attention: q must not require grad"):
        if transform is torch.func.jvp:
            transform(loss, (q,), (torch.ones_like(q),))
        elif transform is torch.func.vjp:
            transform(loss, q)
        else:
            transform(loss)(q)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_written_cache_gets_a_new_version(mode):
    """So that autograd notices a saved tensor that has changed."""
    caches, rows = [torch.zeros(2, 4, 1, 8) for _ in range(2)], torch.ones(1, 1, 8)
    before = [cache._version for cache in caches]
    with mode():
        attn_ext.append_kv(rows, rows, *caches, torch.tensor([3]))
    assert [cache._version for cache in caches] == [version + 1 for version in before]
