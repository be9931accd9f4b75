"""nanoGPT's model against an independent plain torch one, and against itself along every path."""

import math

import pytest
import torch
from model_helpers import CHUNKINGS, paged_logits
from tolerance import assert_as_accurate_as_torch, assert_same_bits
from torch import nn
from torch.nn import functional as F

from attn_ext.nanogpt import GPT, MLP, Block, CausalSelfAttention, GPTConfig, LayerNorm


class PlainLayerNorm(nn.Module):
    def __init__(self, n, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class PlainAttention(nn.Module):
    def __init__(self, c, fused):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.heads, self.fused = c.n_head, fused

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.mT) / math.sqrt(q.shape[-1])
            future = torch.ones(t, t, dtype=torch.bool).triu(1)
            y = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class PlainMLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)
        self.act = nn.GELU(approximate="tanh" if c.activation == "gelu_tanh" else "none")

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class PlainBlock(nn.Module):
    def __init__(self, c, fused):
        super().__init__()
        self.ln_1, self.ln_2 = PlainLayerNorm(c.n_embd, c.bias), PlainLayerNorm(c.n_embd, c.bias)
        self.attn, self.mlp = PlainAttention(c, fused), PlainMLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PlainGPT(nn.Module):
    """nanoGPT in plain torch, with its sampling loop that computes the whole context at every step."""

    def __init__(self, c, fused=True):
        super().__init__()
        self.block_size = c.block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c.vocab_size, c.n_embd),
                "wpe": nn.Embedding(c.block_size, c.n_embd),
                "h": nn.ModuleList([PlainBlock(c, fused) for _ in range(c.n_layer)]),
                "ln_f": PlainLayerNorm(c.n_embd, c.bias),
            }
        )
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx, targets=None):
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[0][:, -1]
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                logits = logits / temperature
                if top_k is not None:
                    kept = torch.topk(logits, min(top_k, logits.shape[-1]))[0]
                    logits[logits < kept[:, [-1]]] = -math.inf
                new = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat([idx, new], dim=1)
        return idx


def config(**changes):
    return GPTConfig(**{"block_size": 16, "vocab_size": 37, "n_layer": 2, "n_head": 3, "n_embd": 24, **changes})


def randomise(model):
    """Weights that make every part matter: the initial ones are small, with biases of 0 and norms of 1."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return model


@pytest.fixture
def pair():
    def make(fused=True, **changes):
        c = config(**changes)
        plain = randomise(PlainGPT(c, fused)).eval()
        ours = GPT(c).eval()
        ours.load_state_dict(plain.state_dict())
        return ours, plain

    return make


def test_parameter_names_are_nanogpts():
    c = config()
    model = GPT(c)
    assert set(model.state_dict()) == set(PlainGPT(c).state_dict())
    assert {f"transformer.h.1.{name}" for name in Block(c).state_dict()} < set(model.state_dict())
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"activation": "gelu_tanh"},
        {"n_head": 1, "n_embd": 7},
        {"n_head": 8, "n_embd": 64, "n_layer": 1},
        {"flash": False},
    ],
    ids=str,
)
@torch.no_grad()
def test_forward_is_nanogpts(backend, dtype, pair, changes):
    ours, plain = pair(**changes)
    ours, exact = ours.to(dtype), plain.to(dtype).double()
    plain = PlainGPT(ours.config).to(dtype)
    plain.load_state_dict(exact.state_dict())
    idx = torch.randint(37, (3, 11))
    targets = torch.randint(37, (3, 11))
    targets[0, :4] = -1
    logits, loss = ours(idx, targets)
    assert logits.shape == (3, 11, 37)
    assert_as_accurate_as_torch(logits, exact(idx, targets)[0], plain(idx, targets)[0], what="logits")
    torch.testing.assert_close(loss.double(), exact(idx, targets)[1], atol=0, rtol=8 * torch.finfo(dtype).eps)
    last, none = ours(idx)
    assert none is None and last.shape == (3, 1, 37)
    assert_same_bits(last[:, 0], logits[:, -1])


@torch.no_grad()
def test_both_of_nanogpts_attention_paths_agree_with_both_of_ours(backend, pair):
    idx = torch.randint(37, (2, 16))
    targets = torch.randint(37, (2, 16))
    ours, plain = pair()
    explicit = PlainGPT(ours.config, fused=False).eval()
    explicit.load_state_dict(plain.state_dict())
    exact = PlainGPT(ours.config).double()
    exact.load_state_dict(plain.state_dict())
    exact = exact(idx, targets)[0]
    for flash in (True, False):
        for block in ours.transformer.h:
            block.attn.flash = flash
        for other in (plain, explicit):
            assert_as_accurate_as_torch(ours(idx, targets)[0], exact, other(idx, targets)[0], what=f"flash={flash}")


@torch.no_grad()
def test_flash_false_takes_the_explicit_path(monkeypatch):
    from attn_ext import ops

    def fail(*args, **kwargs):
        raise AssertionError("the fused op was called")

    monkeypatch.setattr(ops, "attention", fail)
    CausalSelfAttention(config(flash=False))(torch.randn(1, 3, 24))
    with pytest.raises(AssertionError, match="fused op"):
        CausalSelfAttention(config(flash=True))(torch.randn(1, 3, 24))


@pytest.mark.parametrize("rows, prompt, new", [(1, 1, 8), (2, 5, 11), (3, 16, 6), (1, 20, 9), (2, 3, 40)])
@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.7, 5), (1.3, 1000), (1.0, 1), (0, None)])
def test_generate_gives_nanogpts_tokens(pair, rows, prompt, new, temperature, top_k):
    """Also past block_size (16), where the context is the last 16 tokens."""
    ours, plain = pair()
    idx = torch.randint(37, (rows, prompt))
    torch.manual_seed(3)
    expected = plain.generate(idx, new, temperature, top_k)
    torch.manual_seed(3)
    assert ours.generate(idx, new, temperature, top_k).tolist() == expected.tolist()


def test_greedy_is_the_same_each_run_and_draws_nothing(pair):
    ours, _ = pair()
    state = torch.get_rng_state()
    first = ours.generate(torch.tensor([[5]]), 30, temperature=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, ours.generate(torch.tensor([[5]]), 30, temperature=0.0, top_k=3))


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-46, 5e-324])
def test_a_tiny_temperature_is_greedy(pair, temperature):
    ours, _ = pair()
    idx = torch.tensor([[5], [7]])
    assert torch.equal(ours.generate(idx, 9, temperature=temperature), ours.generate(idx, 9, temperature=0))


@pytest.mark.parametrize(
    "idx, options, message",
    [
        ([[1]], {"top_k": 0}, "generate: top_k must be >= 1 or None, got 0"),
        ([[1]], {"top_k": -2}, "generate: top_k must be >= 1 or None, got -2"),
        ([[1]], {"temperature": -1.0}, "generate: temperature must be >= 0, got -1.0"),
        ([[1]], {"temperature": math.nan}, "generate: temperature must be >= 0, got nan"),
        ([[1]], {"max_new_tokens": -1}, "generate: max_new_tokens must be >= 0, got -1"),
        ([[]], {}, r"generate: idx must be \(B, T\) with B and T >= 1, got shape \(1, 0\)"),
        ([1, 2], {}, r"generate: idx must be \(B, T\) with B and T >= 1, got shape \(2,\)"),
        ([[1.0]], {}, "generate: idx must be int64, got torch.float32"),
        ([[1, 37]], {}, r"generate: idx must hold tokens in 0 … 36, got 37"),
        ([[1, -1]], {}, r"generate: idx must hold tokens in 0 … 36, got -1"),
    ],
)
def test_generate_refuses(pair, idx, options, message):
    ours, _ = pair()
    with pytest.raises(ValueError, match=message):
        ours.generate(torch.tensor(idx) if idx != [[]] else torch.empty(1, 0), **{"max_new_tokens": 1, **options})


def test_generate_of_no_tokens_returns_the_prompt(pair):
    ours, _ = pair()
    assert ours.generate(torch.tensor([[1, 2]]), 0).tolist() == [[1, 2]]


@pytest.mark.parametrize("chunking", CHUNKINGS, ids=str)
@torch.no_grad()
def test_every_chunking_gives_the_logits_of_the_full_forward(backend, dtype, pair, chunking):
    ours = pair()[0].to(dtype)
    prompt = torch.randint(37, (11,)).tolist()
    whole, _ = ours(torch.tensor([prompt]), torch.zeros(1, 11, dtype=torch.int64))
    (steps,) = paged_logits(ours, [prompt], [chunking])
    assert_same_bits(steps, whole[0].float(), f"chunks of {chunking}")


@torch.no_grad()
def test_logits_do_not_depend_on_the_batch(backend, pair):
    ours, _ = pair()
    prompts = [torch.randint(37, (n,)).tolist() for n in (11, 3, 16, 1)]
    chunks = [[4, 4, 3], [1, 1, 1], [16], [1]]
    alone = [paged_logits(ours, [p], [c], block_size=3)[0] for p, c in zip(prompts, chunks, strict=True)]
    for i, logits in enumerate(paged_logits(ours, prompts, chunks, block_size=5)):
        assert_same_bits(logits, alone[i], f"prompt {i}")


@pytest.mark.parametrize("n", [1, 7, 64, 577, 4096])
@torch.no_grad()
def test_layer_norm_rows_do_not_depend_on_the_batch(dtype, threads, n):
    norm = randomise(LayerNorm(n, bias=True)).to(dtype)
    x = torch.randn(67, n).to(dtype)
    whole = norm(x)
    for count in (1, 2):
        threads(count)
        for rows in (1, 2, 3, 8, 17):
            assert_same_bits(norm(x[5 : 5 + rows]), whole[5 : 5 + rows], f"{rows} rows, {count} threads")


@torch.no_grad()
def test_forward_refuses_more_than_block_size():
    with pytest.raises(ValueError, match=r"GPT.forward: idx must be at most block_size \(16\) long, got 17"):
        GPT(config()).eval()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("module", [CausalSelfAttention, MLP])
def test_dropout_in_training_is_refused(module):
    c = config(dropout=0.1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="dropout must be 0 in training mode"):
        module(c).train()(torch.randn(1, 3, 24))
    with torch.no_grad(), pytest.raises(RuntimeError, match="GPT: dropout must be 0 in training mode"):
        GPT(c).train()(torch.zeros(1, 3, dtype=torch.int64))
    with torch.no_grad():
        assert module(c).eval()(torch.randn(1, 3, 24)).shape == (1, 3, 24)
        assert GPT(config()).train()(torch.zeros(1, 3, dtype=torch.int64))[0].shape == (1, 1, 37)


def test_asking_for_gradients_raises():
    """Never a silent detach: without gradients there is no training."""
    idx = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="grad"):
        GPT(config())(idx, idx)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_embd": 25}, "GPTConfig: n_embd must be a multiple of n_head, got n_embd 25 and n_head 3"),
        ({"n_head": 0}, "GPTConfig: n_head must be a whole number >= 1, got 0"),
        ({"n_embd": 0}, "GPTConfig: n_embd must be a whole number >= 1, got 0"),
        ({"vocab_size": 0}, "GPTConfig: vocab_size must be a whole number >= 1, got 0"),
        ({"block_size": 1.5}, "GPTConfig: block_size must be a whole number >= 1, got 1.5"),
        ({"n_layer": "x"}, "GPTConfig: n_layer must be a whole number >= 1, got 'x'"),
        ({"dropout": 2}, "GPTConfig: dropout must be a number from 0 to 1, got 2"),
        ({"bias": "no"}, "GPTConfig: bias must be True or False, got 'no'"),
        ({"layer_norm_eps": None}, "GPTConfig: layer_norm_eps must be a number above 0, got None"),
        ({"activation": "relu"}, "GPTConfig: activation must be 'gelu' or 'gelu_tanh', got 'relu'"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
