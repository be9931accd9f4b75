"""Each check fires: one line that names the op, the argument, the rule and what it got; nothing is written before."""

import re

import pytest
import torch
from tolerance import assert_same_bits

import attn_ext

F16, BF16, F64, INT32, INT64 = torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def ints(*values, dtype=INT32):
    return torch.tensor(values, dtype=dtype)


def good() -> dict[str, dict]:
    """Arguments of each op that are right. 2 sequences, 4 query and 2 key/value heads of 8, blocks of 4."""
    dense = {"q": randn(2, 3, 4, 8), "k": randn(2, 5, 2, 8), "v": randn(2, 5, 2, 8)}
    caches = {"key_cache": randn(6, 4, 2, 8), "value_cache": randn(6, 4, 2, 8)}
    projection = {"x": randn(3, 16), "weight": randn(64, 16), "bias": randn(64), "n_heads": 4, "n_kv_heads": 2}
    return {
        "linear": {
            "x": randn(3, 16), "weight": randn(5, 16), "bias": randn(5), "residual": randn(3, 5),
            "multiply": randn(3, 5),
        },
        "qkv_projection": projection,
        "qkv_projection_to_cache": {
            **projection, **caches, "slot_mapping": ints(3, -1, 9, dtype=INT64),
            "rope": (randn(7, 4), randn(7, 4), ints(0, 6, 2, dtype=INT64)),
        },
        "rms_norm": {"x": randn(2, 3, 7), "weight": randn(7), "eps": 1e-6},
        "layer_norm": {"x": randn(2, 3, 7), "weight": randn(7), "bias": randn(7), "eps": 1e-6},
        "masked_softmax": {"scores": randn(2, 3, 5, 7), "mask": randn(3, 5, 7)},
        "attention": dense,
        "attention_varlen": {
            "q": randn(6, 4, 8), "k": randn(9, 2, 8), "v": randn(9, 2, 8), "cu_seqlens_q": ints(0, 2, 6),
            "cu_seqlens_k": ints(0, 5, 9),
        },
        "paged_attention": {
            "q": randn(2, 3, 4, 8), **caches, "block_table": ints(0, 5, 3, 2).reshape(2, 2), "seq_lens": ints(7, 4),
        },
        "append_kv": {
            "key": randn(3, 2, 8), "value": randn(3, 2, 8), **caches, "slot_mapping": ints(3, -1, 9, dtype=INT64)
        },
        "copy_blocks": {**caches, "block_pairs": ints(0, 1, 1, 2, dtype=INT64).reshape(2, 2)},
        "merge_attention": {
            "out_a": randn(2, 3, 4, 8), "lse_a": randn(2, 4, 3), "out_b": randn(2, 3, 4, 8), "lse_b": randn(2, 4, 3)
        },
    }  # fmt: skip


NAN, INF = float("nan"), float("inf")
ROPE = (randn(7, 4), randn(7, 4), ints(0, 6, 2, dtype=INT64))

# op, what is wrong with its arguments, the argument the message must name (a regex)
BAD = [
    ("linear", {"x": torch.tensor(1.0)}, "x"),
    ("linear", {"x": randn(3, 15)}, "x"),
    ("linear", {"x": randn(3, 16).long()}, "x"),
    ("linear", {"x": torch.zeros(3, 16, dtype=torch.complex64)}, "x"),
    ("linear", {"x": torch.zeros(3, 16, dtype=torch.bool)}, "x"),
    ("linear", {"weight": randn(5)}, "weight"),
    ("linear", {"weight": randn(1, 5, 16)}, "weight"),
    ("linear", {"weight": randn(5, 16, dtype=BF16)}, "x, weight and bias"),
    ("linear", {"bias": randn(6)}, "bias"),
    ("linear", {"bias": randn(1, 5)}, "bias"),
    ("linear", {"bias": torch.tensor(1.0)}, "bias"),
    ("linear", {"bias": randn(5, dtype=F64)}, "x, weight and bias"),
    ("linear", {"residual": randn(3, 6)}, "residual"),
    ("linear", {"residual": randn(5)}, "residual"),
    ("linear", {"residual": randn(3, 5, dtype=F16)}, "x and residual"),
    ("linear", {"multiply": randn(3, 6)}, "multiply"),
    ("linear", {"multiply": randn(5)}, "multiply"),
    ("linear", {"multiply": randn(3, 1)}, "multiply"),
    ("linear", {"multiply": randn(3, 5, dtype=F16)}, "x and multiply"),
    ("linear", {"activation": "relu"}, "activation"),
    ("linear", {"activation": ""}, "activation"),
    ("qkv_projection", {"x": randn(3, 15)}, "x"),
    ("qkv_projection", {"weight": randn(63, 16)}, "weight"),
    ("qkv_projection", {"weight": randn(0, 16), "bias": randn(0)}, "weight"),
    ("qkv_projection", {"weight": randn(64)}, "weight"),
    ("qkv_projection", {"bias": randn(63)}, "bias"),
    ("qkv_projection", {"x": randn(3, 16, dtype=F16)}, "x, weight and bias"),
    ("qkv_projection", {"n_heads": 3}, "the number of query heads"),
    ("qkv_projection", {"n_heads": 0}, "the number of query heads"),
    ("qkv_projection", {"n_heads": -4}, "the number of query heads"),
    ("qkv_projection", {"n_kv_heads": 0}, "the number of query heads"),
    ("qkv_projection", {"n_kv_heads": 8}, "the number of query heads"),
    ("qkv_projection_to_cache", {"x": randn(3, 15)}, "x"),
    ("qkv_projection_to_cache", {"weight": randn(63, 16)}, "weight"),
    ("qkv_projection_to_cache", {"key_cache": randn(6, 4, 2, 9)}, "value_cache"),
    ("qkv_projection_to_cache", {"key_cache": randn(6, 4, 1, 8), "value_cache": randn(6, 4, 1, 8)}, "key_cache"),
    ("qkv_projection_to_cache", {"key_cache": randn(6, 4, 2, 4), "value_cache": randn(6, 4, 2, 4)}, "key_cache"),
    ("qkv_projection_to_cache", {"key_cache": randn(6, 4, 2, 8, dtype=BF16)}, "x, key_cache and value_cache"),
    ("qkv_projection_to_cache", {"slot_mapping": ints(3, -1, dtype=INT64)}, "slot_mapping"),
    ("qkv_projection_to_cache", {"slot_mapping": ints(3, -2, 9, dtype=INT64)}, r"slot_mapping\[1\]"),
    ("qkv_projection_to_cache", {"slot_mapping": ints(3, 4, 24, dtype=INT64)}, r"slot_mapping\[2\]"),
    ("qkv_projection_to_cache", {"slot_mapping": ints(3, 4, 3, dtype=INT64)}, "slot_mapping"),
    ("qkv_projection_to_cache", {"slot_mapping": ints(3, -1, 9)}, "slot_mapping"),
    ("qkv_projection_to_cache", {"rope": (None, *ROPE[1:])}, "rope"),
    ("qkv_projection_to_cache", {"rope": (*ROPE[:2], None)}, "rope"),
    ("qkv_projection_to_cache", {"rope": (randn(7, 3), *ROPE[1:])}, "cos"),
    ("qkv_projection_to_cache", {"rope": (randn(7), *ROPE[1:])}, "cos"),
    ("qkv_projection_to_cache", {"rope": (ROPE[0].half(), *ROPE[1:])}, "cos"),
    ("qkv_projection_to_cache", {"rope": (ROPE[0], randn(8, 4), ROPE[2])}, "sin"),
    ("qkv_projection_to_cache", {"rope": (ROPE[0], ROPE[1].half(), ROPE[2])}, "sin"),
    ("qkv_projection_to_cache", {"rope": (*ROPE[:2], ints(0, 1, dtype=INT64))}, "positions"),
    ("qkv_projection_to_cache", {"rope": (*ROPE[:2], ints(0, 1, 2))}, "positions"),
    ("qkv_projection_to_cache", {"rope": (*ROPE[:2], ints(0, 7, 2, dtype=INT64))}, r"positions\[1\]"),
    ("qkv_projection_to_cache", {"rope": (*ROPE[:2], ints(0, 6, -1, dtype=INT64))}, r"positions\[2\]"),
    *((op, options, argument) for op in ("rms_norm", "layer_norm") for options, argument in (
        ({"x": torch.tensor(1.0)}, "x"),
        ({"x": torch.zeros(3, 7, dtype=INT64)}, "x"),
        ({"x": randn(3, 8)}, "weight"),
        ({"weight": randn(1)}, "weight"),
        ({"weight": randn(1, 7)}, "weight"),
        ({"weight": randn(7, dtype=BF16)}, "x(, weight)? and (weight|bias)"),
        ({"eps": -1e-5}, "eps"),
        ({"eps": NAN}, "eps"),
        ({"eps": 1e39}, "eps"),
    )),
    ("layer_norm", {"bias": randn(8)}, "bias"),
    ("layer_norm", {"bias": randn(1, 7)}, "bias"),
    ("layer_norm", {"bias": randn(7, dtype=F64)}, "x, weight and bias"),
    ("masked_softmax", {"scores": randn(7)}, "scores"),
    ("masked_softmax", {"scores": torch.tensor(1.0), "mask": None}, "scores"),
    ("masked_softmax", {"scores": torch.zeros(5, 7, dtype=INT64), "mask": None}, "scores"),
    ("masked_softmax", {"mask": randn(3, 5, 6)}, "mask"),
    ("masked_softmax", {"mask": randn(2, 5, 7)}, "mask"),
    ("masked_softmax", {"mask": randn(1, 2, 3, 5, 7)}, "mask"),
    ("masked_softmax", {"mask": torch.ones(5, 7, dtype=INT64)}, "mask"),
    ("masked_softmax", {"mask": randn(5, 7, dtype=F16)}, "mask"),
    ("masked_softmax", {"scale": NAN}, "scale"),
    ("masked_softmax", {"scale": -INF}, "scale"),
    ("attention", {"q": randn(3, 4, 8)}, "q"),
    ("attention", {"k": randn(5, 2, 8)}, "k"),
    ("attention", {"v": randn(2, 5, 2, 9)}, "v"),
    ("attention", {"v": randn(2, 6, 2, 8)}, "v"),
    ("attention", {"k": randn(3, 5, 2, 8), "v": randn(3, 5, 2, 8)}, "k"),
    ("attention", {"k": randn(2, 5, 2, 7), "v": randn(2, 5, 2, 7)}, "k"),
    ("attention", {"q": randn(2, 3, 4, 0), "k": randn(2, 5, 2, 0), "v": randn(2, 5, 2, 0)}, "q"),
    ("attention", {"k": randn(2, 5, 3, 8), "v": randn(2, 5, 3, 8)}, "the number of query heads"),
    ("attention", {"q": randn(2, 3, 0, 8)}, "the number of query heads"),
    ("attention", {"q": randn(2, 3, 4, 8, dtype=BF16)}, "q, k and v"),
    ("attention", {"v": randn(2, 5, 2, 8, dtype=F64)}, "q, k and v"),
    ("attention", {name: torch.zeros(2, 5, 2, 8, dtype=INT32) for name in "qkv"}, "q"),
    *((op, options, argument) for op in ("attention", "attention_varlen", "paged_attention") for options, argument in (
        ({"scale": NAN}, "scale"),
        ({"scale": INF}, "scale"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": 1e-39}, "softcap"),
        ({"softcap": NAN}, "softcap"),
        ({"softcap": INF}, "softcap"),
        ({"window": (-2, 0)}, "window"),
        ({"window": (0, -2)}, "window"),
        ({"alibi_slopes": randn(3)}, "alibi_slopes"),
        ({"alibi_slopes": randn(3, 4)}, "alibi_slopes"),
        ({"alibi_slopes": randn(4, dtype=BF16)}, "alibi_slopes"),
        ({"sinks": randn(3)}, "sinks"),
        ({"sinks": randn(2, 4)}, "sinks"),
        ({"sinks": randn(4, dtype=F64)}, "sinks"),
        ({"mask": randn(1, 1, 1, 1)}, "mask"),
        ({"mask": torch.ones(3, 1, 1, 1, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(1, 3, 1, 1, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)}, "mask"),
        ({"bias": randn(2, 1, 1, 2)}, "bias"),
        ({"bias": randn(1, 1, 1, 1, dtype=F16)}, "bias"),
        ({"bias": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}, "bias"),
    )),
    ("attention", {"mask": torch.ones(2, 4, 3, 6, dtype=torch.bool)}, "mask"),  # longer only where lengths are ragged
    ("attention_varlen", {"q": randn(1, 6, 4, 8)}, "q"),
    ("attention_varlen", {"k": randn(9, 8)}, "k"),
    ("attention_varlen", {"v": randn(8, 2, 8)}, "v"),
    ("attention_varlen", {"k": randn(9, 2, 7), "v": randn(9, 2, 7)}, "k"),
    ("attention_varlen", {"k": randn(9, 3, 8), "v": randn(9, 3, 8)}, "the number of query heads"),
    ("attention_varlen", {"q": randn(6, 4, 8, dtype=F16)}, "q, k and v"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 2, 6, dtype=INT64)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 2, 6).float()}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 2, 6)[None]}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints()}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(1, 2, 6)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 2, 5)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 2, 7)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, 7, 6)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_q": ints(0, -1, 6)}, "cu_seqlens_q"),
    ("attention_varlen", {"cu_seqlens_k": ints(0, 9)}, "cu_seqlens_k"),
    ("attention_varlen", {"cu_seqlens_k": ints(0, 10, 9)}, "cu_seqlens_k"),
    ("attention_varlen", {"cu_seqlens_k": ints(0, 5, 10)}, "cu_seqlens_k"),
    ("attention_varlen", {"max_seqlen_q": 3}, "max_seqlen_q"),
    ("attention_varlen", {"max_seqlen_k": 4}, "max_seqlen_k"),
    ("attention_varlen", {"max_seqlen_k": -1}, "max_seqlen_k"),
    ("paged_attention", {"q": randn(6, 4, 8)}, "q"),
    ("paged_attention", {"cu_seqlens_q": ints(0, 2, 6)}, "q"),
    ("paged_attention", {"key_cache": randn(6, 4, 16)}, "key_cache"),
    ("paged_attention", {"value_cache": randn(6, 4, 2, 9)}, "value_cache"),
    ("paged_attention", {"value_cache": randn(7, 4, 2, 8)}, "value_cache"),
    ("paged_attention", {"key_cache": randn(6, 4, 8, 2).transpose(2, 3)}, "key_cache"),
    ("paged_attention", {"key_cache": randn(6, 0, 2, 8), "value_cache": randn(6, 0, 2, 8)}, "key_cache"),
    ("paged_attention", {"key_cache": randn(6, 4, 2, 7), "value_cache": randn(6, 4, 2, 7)}, "key_cache"),
    ("paged_attention", {f"{x}_cache": randn(6, 4, 3, 8) for x in ("key", "value")}, "the number of query heads"),
    ("paged_attention", {"key_cache": randn(6, 4, 2, 8, dtype=F16)}, "q, key_cache and value_cache"),
    ("paged_attention", {"block_table": ints(0, 5)}, "block_table"),
    ("paged_attention", {"block_table": ints(0, 5)[None]}, "block_table"),
    ("paged_attention", {"block_table": ints(0, 5, 3, 2, dtype=INT64).reshape(2, 2)}, "block_table"),
    ("paged_attention", {"block_table": ints(0, 6, 3, 2).reshape(2, 2)}, r"block_table\[0\]\[1\]"),
    ("paged_attention", {"block_table": ints(0, 5, -1, 2).reshape(2, 2)}, r"block_table\[1\]\[0\]"),
    ("paged_attention", {"seq_lens": ints(7)}, "seq_lens"),
    ("paged_attention", {"seq_lens": ints(7, 4)[None]}, "seq_lens"),
    ("paged_attention", {"seq_lens": ints(7, 4, dtype=INT64)}, "seq_lens"),
    ("paged_attention", {"seq_lens": ints(9, 4)}, r"seq_lens\[0\]"),
    ("paged_attention", {"seq_lens": ints(7, -1)}, r"seq_lens\[1\]"),
    ("paged_attention", {"max_seqlen_q": 2}, "max_seqlen_q"),
    ("paged_attention", {"q": randn(6, 4, 8), "cu_seqlens_q": ints(0, 6)}, "seq_lens"),
    ("paged_attention", {"q": randn(6, 4, 8), "cu_seqlens_q": ints(0, 2, 5)}, "cu_seqlens_q"),
    ("paged_attention", {"q": randn(6, 4, 8), "cu_seqlens_q": ints(0, 2, 6), "max_seqlen_q": 3}, "max_seqlen_q"),
    ("append_kv", {"key": randn(3, 16), "value": randn(3, 16)}, "key"),
    ("append_kv", {"value": randn(2, 2, 8)}, "value"),
    ("append_kv", {"key": randn(3, 1, 8), "value": randn(3, 1, 8)}, "key"),
    ("append_kv", {"key": randn(3, 2, 7), "value": randn(3, 2, 7)}, "key"),
    ("append_kv", {"value": randn(3, 2, 8, dtype=F16)}, "key, value, key_cache and value_cache"),
    ("append_kv", {"value_cache": randn(6, 4, 2, 8, dtype=F16)}, "key, value, key_cache and value_cache"),
    ("append_kv", {"value_cache": randn(5, 4, 2, 8)}, "value_cache"),
    ("append_kv", {"value_cache": randn(6, 4, 8, 2).transpose(2, 3)}, "value_cache"),
    ("append_kv", {"slot_mapping": ints(3, 4, dtype=INT64)}, "slot_mapping"),
    ("append_kv", {"slot_mapping": ints(3, 4, 5, 6, dtype=INT64)}, "slot_mapping"),
    ("append_kv", {"slot_mapping": ints(3, 4, 5)}, "slot_mapping"),
    ("append_kv", {"slot_mapping": ints(3, 4, 24, dtype=INT64)}, r"slot_mapping\[2\]"),
    ("append_kv", {"slot_mapping": ints(3, -2, 5, dtype=INT64)}, r"slot_mapping\[1\]"),
    ("append_kv", {"slot_mapping": ints(3, 5, 3, dtype=INT64)}, "slot_mapping"),
    ("copy_blocks", {"key_cache": randn(6, 4, 16)}, "key_cache"),
    ("copy_blocks", {"value_cache": randn(5, 4, 2, 8)}, "value_cache"),
    ("copy_blocks", {"value_cache": randn(6, 4, 2, 8, dtype=F16)}, "key_cache and value_cache"),
    ("copy_blocks", {"block_pairs": ints(0, 1, dtype=INT64)}, "block_pairs"),
    ("copy_blocks", {"block_pairs": ints(0, 1, 2, dtype=INT64)[None]}, "block_pairs"),
    ("copy_blocks", {"block_pairs": ints(0, 1)[None]}, "block_pairs"),
    ("copy_blocks", {"block_pairs": ints(0, 1, 0, 6, dtype=INT64).reshape(2, 2)}, r"block_pairs\[1\]\[1\]"),
    ("copy_blocks", {"block_pairs": ints(0, 1, -1, 2, dtype=INT64).reshape(2, 2)}, r"block_pairs\[1\]\[0\]"),
    ("copy_blocks", {"block_pairs": [(0, 2), (1, 2)]}, "block_pairs"),
    ("merge_attention", {"out_a": randn(3, 8)}, "out_a"),
    ("merge_attention", {"out_b": randn(2, 3, 4, 7)}, "out_b"),
    ("merge_attention", {"out_b": randn(2, 3, 4, 8, dtype=F16)}, "out_a and out_b"),
    ("merge_attention", {"out_a": torch.zeros(2, 3, 4, 8, dtype=INT32)}, "out_a"),
    ("merge_attention", {"lse_a": randn(2, 3, 4)}, "lse_a"),
    ("merge_attention", {"lse_b": randn(4, 6)}, "lse_b"),
    ("merge_attention", {"lse_b": randn(2, 4, 3, dtype=F64)}, "lse_b"),
    ("merge_attention", {"lse_a": randn(2, 4, 3, dtype=BF16)}, "lse_a"),
]  # fmt: skip


def _describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return str(value) if not isinstance(value, tuple) else ",".join(_describe(v) for v in value)


def _id(case) -> str:
    op, wrong, _ = case
    return f"{op}-" + ",".join(f"{name}={_describe(value)}" for name, value in wrong.items())


@pytest.mark.parametrize("case", BAD, ids=_id)
def test_bad_argument(case):
    op, wrong, argument = case
    arguments = {**good()[op], **wrong}
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    with pytest.raises(RuntimeError) as error:
        getattr(attn_ext, op)(**arguments)
    message = str(error.value)
    assert re.fullmatch(rf"{op}: {argument} must .+, got .+", message), message
    for name, t in tensors.items():
        if not t.is_complex() and t.dtype != torch.bool:
            assert_same_bits(t, before[name], name)


@pytest.mark.parametrize("op", good())
def test_good_arguments_pass(op):
    """What the table above starts from raises nothing."""
    getattr(attn_ext, op)(**good()[op])


@pytest.mark.parametrize("op", good())
def test_every_tensor_is_checked_for_its_dtype_and_rank(op):
    """A tensor of 7 dims, one of an integer or floating dtype where the other kind belongs: each is refused."""
    arguments = good()[op]
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        other_kind = value.long() if value.is_floating_point() else value.float()
        for wrong in (value.reshape(*[1] * (7 - value.dim()), *value.shape), other_kind):
            if name in ("x", "scores") and wrong.dim() == 7:
                continue  # any number of leading dims is right
            with pytest.raises(RuntimeError, match=rf"^{op}: .*must .*got "):
                getattr(attn_ext, op)(**{**arguments, name: wrong})


def test_wrong_python_types_are_refused():
    with pytest.raises((TypeError, RuntimeError)):
        attn_ext.attention(1.0, 2.0, 3.0)
    with pytest.raises(TypeError):
        attn_ext.attention(**good()["attention"], dropout_p=0.1)
    with pytest.raises(TypeError):
        attn_ext.qkv_projection(randn(3, 16), randn(48, 16))


@pytest.mark.parametrize("pairs", [[(0.5, 1.5)], [(True, False)], [0, 1, 2, 3], [(0, 1, 2)]])
def test_copy_blocks_takes_pairs_of_integers(pairs):
    """A list is not bent into pairs: no fraction is cut off, no flat list is folded."""
    caches = [torch.arange(3.0).reshape(3, 1, 1, 1).clone() for _ in range(2)]
    with pytest.raises(RuntimeError, match="^copy_blocks: block_pairs must"):
        attn_ext.copy_blocks(*caches, pairs)
    assert all(cache.flatten().tolist() == [0, 1, 2] for cache in caches)


@pytest.mark.parametrize("window", [3, (1, 2, 3), (1,)])
def test_window_is_a_pair(window):
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(RuntimeError, match="^attention: window must be None or"):
        attn_ext.attention(q, q, q, window=window)


@pytest.mark.parametrize("scale", [1e39, -1e39, 1e300])
def test_scale_is_finite_in_float32(scale):
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(RuntimeError, match="^attention: scale must be finite in float32"):
        attn_ext.attention(q, q, q, scale=scale)
    with pytest.raises(RuntimeError, match="^masked_softmax: scale must be finite in float32"):
        attn_ext.masked_softmax(torch.zeros(2, 5), scale=scale)
    wide = torch.zeros(2, 5, dtype=torch.float64)
    assert torch.equal(attn_ext.masked_softmax(wide, scale=scale), torch.full_like(wide, 0.2))


def test_meta_tensors_are_checked():
    """Shapes and dtypes that the op refuses are refused without data too."""
    q, k = torch.randn(1, 3, 2, 8, device="meta"), torch.randn(1, 4, 2, 8, device="meta")
    for bad in ((q, k, k[:, :3]), (q, k.half(), k), (q.int(), k.int(), k.int()), (q, k[0], k[0])):
        with pytest.raises(RuntimeError, match="^attention: "):
            attn_ext.attention(*bad)
    with pytest.raises(RuntimeError, match="^linear: bias must have shape"):
        attn_ext.linear(q, q.new_empty(5, 8), q.new_empty(4))
    with pytest.raises(RuntimeError, match="^rms_norm: weight must have shape"):
        attn_ext.rms_norm(q, q.new_empty(7))
    with pytest.raises(RuntimeError, match="^layer_norm: x, weight, bias must have the same dtype"):
        attn_ext.layer_norm(q, q.new_empty(8), q.new_empty(8).half())


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F64], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("eps", [-1e-5, -INF, INF, NAN, 1e39, -1e-40])
def test_meta_tensors_are_refused_for_their_eps_with_the_same_line(eps, dtype):
    x, weight = randn(2, 8, dtype=dtype), randn(8, dtype=dtype)
    for norm in (attn_ext.rms_norm, attn_ext.layer_norm):
        if eps == 1e39 and dtype == F64:
            norm(x.to("meta"), weight.to("meta"), eps=eps)
            continue
        assert_same_error(norm, x, weight, eps=eps)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_meta_tensors_are_refused_for_a_packed_weight_with_the_same_line(dtype):
    x, packed = randn(3, 8, dtype=dtype), attn_ext.pack_weight(randn(48, 8, dtype=dtype))
    for wrong in (packed.transpose(0, 1).contiguous().transpose(0, 1), packed[::2], packed[:, :, :8], packed[..., :0]):
        assert_same_error(attn_ext.linear, x, wrong)
        assert_same_error(attn_ext.qkv_projection, x, wrong, n_heads=1)


def assert_same_error(op, *args, **kwargs):
    with pytest.raises(RuntimeError) as real:
        op(*args, **kwargs)
    meta = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") for a in args]
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(real.value))}$"):
        op(*meta, **kwargs)
