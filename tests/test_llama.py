"""The Llama family against transformers' models with random weights, and against itself along every path."""

import math

import pytest
import torch
from model_helpers import CHUNKINGS, assert_logits_match, paged_logits
from tolerance import assert_as_accurate_as_torch, assert_same_bits

from attn_ext import ops
from attn_ext.llama import Llama, LlamaConfig, RMSNorm, llama3_rope_factors, rope_tables
from attn_ext.loaders import load_model

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500.0,
}  # fmt: skip
# (class of config, what differs from the base)
FAMILY = {
    "ratio1": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "ratio3": ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}),
    "ratio4": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "ratio4-bias": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}),
    "ratio2": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "one-kv-head": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "mlp_bias": True}),
    "head-dim": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10}),
    "tied": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral-window": ("Mistral", {"sliding_window": 4}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"num_attention_heads": 8, "num_key_value_heads": 2}),
}


def random_model(kind, changes):
    """transformers' model with weights that make every part matter (their initial biases are 0 and norms 1)."""
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "tie_word_embeddings": False, "attn_implementation": "sdpa", **changes,
        }
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.15)
    return model


@pytest.fixture
def pair(tmp_path):
    def make(name, dtype=torch.float32):
        theirs = random_model(*FAMILY[name])
        theirs.save_pretrained(tmp_path)
        return load_model(tmp_path, dtype=dtype)[0], theirs

    return make


@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_transformers(backend, pair, name):
    model, theirs = pair(name)
    idx = torch.randint(67, (3, 37))
    logits = model(idx)
    assert logits.shape == (3, 37, 67)
    assert_logits_match(logits, theirs, idx)


@pytest.mark.parametrize("name", ["ratio3", "qwen2", "mistral-window"])
def test_logits_in_each_dtype_are_those_of_transformers(pair, name, dtype):
    model, theirs = pair(name, dtype)
    assert model.dtype == dtype
    idx = torch.randint(67, (2, 37))
    assert_logits_match(model(idx), theirs, idx)


@pytest.mark.parametrize("name", ["ratio4", "ratio4-bias", "ratio2", "one-kv-head", "head-dim", "qwen2"])
def test_fused_projection_is_the_three_separate_ones(backend, pair, name):
    model, theirs = pair(name)
    x = torch.randn(2, 5, model.config.hidden_size)
    for ours, layer in zip(model.layers, theirs.model.layers, strict=True):
        fused = ops.qkv_projection(
            x, ours.attn.wqkv.weight, ours.attn.wqkv.bias, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads
        )
        attn = layer.self_attn.requires_grad_(False)
        for part, module in zip(fused, (attn.q_proj, attn.k_proj, attn.v_proj), strict=True):
            assert_same_bits(part.flatten(-2), ops.linear(x, module.weight, module.bias))
            exact = module.double()(x.double())
            assert_as_accurate_as_torch(part.flatten(-2), exact, module.float()(x))


@pytest.mark.parametrize("chunking", CHUNKINGS, ids=str)
@pytest.mark.parametrize("name", ["ratio3", "llama3-rope", "mistral-window", "qwen2"])
def test_every_chunking_gives_the_logits_of_the_full_forward(backend, pair, name, chunking):
    model, _ = pair(name)
    prompt = torch.randint(67, (11,)).tolist()
    (steps,) = paged_logits(model, [prompt], [chunking])
    assert_same_bits(steps, model(torch.tensor([prompt]))[0], f"chunks of {chunking}")


@pytest.mark.parametrize("chunking", CHUNKINGS, ids=str)
def test_every_chunking_in_each_dtype(dtype, pair, chunking):
    model, _ = pair("ratio3", dtype)
    prompt = torch.randint(67, (11,)).tolist()
    (steps,) = paged_logits(model, [prompt], [chunking])
    assert_same_bits(steps, model(torch.tensor([prompt]))[0].float(), f"chunks of {chunking}")


@pytest.mark.parametrize("name", ["ratio3", "mistral-window"])
def test_logits_do_not_depend_on_the_batch(backend, pair, threads, name):
    model, _ = pair(name)
    prompts = [torch.randint(67, (n,)).tolist() for n in (11, 3, 16, 1)]
    chunks = [[4, 4, 3], [1, 1, 1], [16], [1]]
    alone = [paged_logits(model, [p], [c], block_size=3)[0] for p, c in zip(prompts, chunks, strict=True)]
    for count in (1, 2):
        threads(count)
        for i, logits in enumerate(paged_logits(model, prompts, chunks, block_size=5)):
            assert_same_bits(logits, alone[i], f"prompt {i}, {count} threads")


def test_later_tokens_change_no_earlier_logits(pair):
    model, _ = pair("ratio3")
    idx = torch.randint(67, (1, 12))
    before = model(idx)
    idx[0, 7] = (idx[0, 7] + 1) % 67
    after = model(idx)
    assert_same_bits(after[:, :7], before[:, :7])
    assert not torch.equal(after[:, 7:], before[:, 7:])


@pytest.mark.parametrize("n", [1, 7, 64, 577, 4096])
@torch.no_grad()
def test_rms_norm_rows_do_not_depend_on_the_batch(dtype, threads, n):
    norm = RMSNorm(n, 1e-5)
    norm.weight.normal_()
    norm.to(dtype)
    x = torch.randn(67, n).to(dtype)
    whole = norm(x)
    for count in (1, 2):
        threads(count)
        for rows in (1, 2, 3, 8, 17):
            assert_same_bits(norm(x[5 : 5 + rows]), whole[5 : 5 + rows], f"{rows} rows, {count} threads")


@pytest.mark.parametrize("name", ["theta", "llama3-rope"])
def test_rope_tables_are_those_of_transformers(name):
    """Also at positions far along, where the angles' own rounding is large."""
    config = random_model(*FAMILY[name]).config
    config.max_position_embeddings = 8192
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(8192)[None])
    p, factors = config.rope_parameters, None
    if name == "llama3-rope":
        factors = llama3_rope_factors(
            8, p["rope_theta"], factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64
        )
        assert min(factors) == 1 and max(factors) == 8 and len(set(factors)) > 2  # kept, stretched, and between
    for ours, full in zip(rope_tables(8, 8192, p["rope_theta"], factors), (cos, sin), strict=True):
        # An ulp of a frequency, seen 8192 positions along, is all that may differ.
        torch.testing.assert_close(ours, full[0, :, :4], atol=8192 * 2**-23, rtol=0)


def test_rope_tables_stay_float32_when_the_model_is_cast():
    model = Llama(LlamaConfig(32, 8, 16, n_layers=1, n_heads=2, n_kv_heads=1)).to(torch.bfloat16)
    cos, sin, positions = model.rope(torch.arange(3))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (2048, 2) and positions.tolist() == [0, 1, 2]


def test_forward_refuses_more_than_max_seq_len():
    model = Llama(LlamaConfig(32, 8, 16, n_layers=1, n_heads=2, n_kv_heads=1, max_seq_len=4)).requires_grad_(False)
    with pytest.raises(ValueError, match=r"Llama.forward: idx must be at most max_seq_len \(4\) long, got 5"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_asking_for_gradients_raises():
    model = Llama(LlamaConfig(32, 8, 16, n_layers=1, n_heads=2, n_kv_heads=1))
    with pytest.raises(RuntimeError, match="grad"):
        model(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"factor": 0}, "factor must be a number above 0, got 0"),
        ({"original_max_seq_len": "64"}, "original_max_seq_len must be a number above 0, got '64'"),
        ({"high_freq_factor": 1.0}, "high_freq_factor must be above low_freq_factor, got 1.0 and 1.0"),
    ],
)
def test_llama3_rope_refuses(changes, message):
    good = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 64}
    with pytest.raises(ValueError, match=f"llama3_rope_factors: {message}"):
        llama3_rope_factors(8, 500.0, **{**good, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_heads": 3, "n_kv_heads": 2}, "n_heads must be a multiple of n_kv_heads, got n_heads 3 and n_kv_heads 2"),
        ({"n_kv_heads": 0}, "n_kv_heads must be a whole number >= 1, got 0"),
        ({"vocab_size": "32"}, "vocab_size must be a whole number >= 1, got '32'"),
        ({"head_dim": True}, "head_dim must be a whole number >= 1, got True"),
        ({"sliding_window": 0}, "sliding_window must be a whole number >= 1, got 0"),
        ({"max_seq_len": 10**12}, "max_seq_len must be at most 16777216, got 1000000000000"),
        ({"norm_eps": "a"}, "norm_eps must be a number above 0, got 'a'"),
        ({"rope_theta": math.inf}, "rope_theta must be a number above 0, got inf"),
        ({"rope_factors": (1.0, 0.0)}, r"rope_factors\[1\] must be a number above 0, got 0.0"),
        ({"hidden_size": 9}, "hidden_size must be a multiple of n_heads where head_dim is not given"),
        ({"head_dim": 5}, "head_dim must be even for rotary embeddings, got 5"),
        ({"rope_factors": (1.0,)}, r"rope_factors must have head_dim / 2 \(2\) entries, got 1"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=f"LlamaConfig: {message}"):
        LlamaConfig(
            **{
                "vocab_size": 32,
                "hidden_size": 8,
                "intermediate_size": 16,
                "n_layers": 1,
                "n_heads": 2,
                "n_kv_heads": 1,
            }
            | changes
        )
