"""Models with packed weights: the bits of plain ones along every path, and nothing lost on the way there and back."""

import copy

import pytest
import torch
from model_helpers import CHUNKINGS, paged_logits
from tolerance import assert_same_bits
from torch.multiprocessing.reductions import StorageWeakRef

from attn_ext import ops, packing
from attn_ext.explain import explain
from attn_ext.generate import Engine, SamplingParams, generate
from attn_ext.llama import Llama, LlamaConfig
from attn_ext.nanogpt import GPT, GPTConfig

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def llama(**changes):
    shape = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    return Llama(LlamaConfig(**{**shape, "max_seq_len": 64, **changes}))


MODELS = {
    "gpt": lambda: GPT(GPTConfig(block_size=64, vocab_size=67, n_layer=2, n_head=2, n_embd=32)),
    "gpt-no-padding": lambda: GPT(GPTConfig(block_size=64, vocab_size=64, n_layer=2, n_head=2, n_embd=32, bias=False)),
    "llama": llama,
    "llama-tied": lambda: llama(tie_embeddings=True),
    "llama-biases": lambda: llama(qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama-gate-stays-plain": lambda: llama(intermediate_size=44),
    "llama-odd": lambda: llama(hidden_size=33, head_dim=8, intermediate_size=47),
}  # fmt: skip


def projections(model):
    return [module for module in model.modules() if isinstance(module, packing.Projection)]


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    model = MODELS[request.param]().eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.2)
    return model


def logits(model, idx):
    return model(idx)[0] if isinstance(model, GPT) else model(idx)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_is_plain_to_the_bit(backend, dtype, model):
    model = model.to(dtype)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    idx, prompts = torch.randint(model.vocab_size, (2, 11)), [[1, model.vocab_size - 1, 3], [5] * 11]
    dense, paged = logits(model, idx), paged_logits(model, prompts, [[2, 1], CHUNKINGS[2]])
    nothing_fits = dtype.itemsize == 2 and model.lm_head.in_features % 2
    assert model.pack_weights() is model and model.packed == (not nothing_fits)
    assert_same_bits(logits(model, idx), dense)
    for now, before in zip(paged_logits(model, prompts, [[2, 1], CHUNKINGS[2]]), paged, strict=True):
        assert_same_bits(now, before)
    assert model.unpack_weights() is model and not model.packed
    assert [name for name, _ in model.named_parameters()] == list(weights)
    for name, p in model.named_parameters():
        assert_same_bits(p.data, weights[name])


def test_every_weight_that_fits_is_packed(model):
    model.pack_weights()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            fits = module.out_features % 16 == 0 or name == "lm_head"  # float32 takes any K
            assert (module.weight.dim() == 4) == fits, name


def test_a_tied_table_stays_one_tensor():
    model = llama(tie_embeddings=True).requires_grad_(False).bfloat16().pack_weights()
    assert model.embed.weight is model.lm_head.weight and model.embed.weight.shape == (5, 16, 16, 2)
    state = model.state_dict()
    assert state["embed.weight"] is state["lm_head.weight"] and state["embed.weight"].shape == (67, 32)
    assert model.unpack_weights().embed.weight is model.lm_head.weight
    assert model.embed.weight.untyped_storage().nbytes() == 67 * 32 * 2  # the padding is gone


def test_memory_is_not_doubled(model, monkeypatch):
    """When a weight is packed, the plain ones before it are gone; when it is unpacked, the arenas before its own."""
    monkeypatch.setattr(packing, "_ARENA", 1)  # an arena for each weight
    for name, change in (("pack_weight", model.pack_weights), ("unpack_weight", model.unpack_weights)):
        old, real, alive = (
            [StorageWeakRef(m.weight.untyped_storage()) for m in projections(model)],
            getattr(ops, name),
            [],
        )

        def spy(weight, real=real, alive=alive, old=old):
            alive.append(sum(not ref.expired() for ref in old))
            return real(weight)

        monkeypatch.setattr(ops, name, spy)
        change()
        assert len(alive) > 1 and alive == [alive[0] - i for i in range(len(alive))]
        assert sum(not ref.expired() for ref in old) == len(old) - len(alive)


@pytest.mark.parametrize("size", [16384, 3 << 20], ids=["small pages", "huge pages"])
def test_arenas_hold_neighbours(monkeypatch, size):
    monkeypatch.setattr(packing, "_ARENA", size)
    shape = {"hidden_size": 256, "intermediate_size": 768} if size > packing._HUGE_PAGE else {}
    model = llama(n_layers=4, tie_embeddings=True, **shape).requires_grad_(False).pack_weights()
    arenas = {}
    for weight in {id(m.weight): m.weight for m in projections(model)}.values():
        arenas.setdefault(weight.untyped_storage().data_ptr(), []).append(weight)
    assert 1 < len(arenas) < len(projections(model))
    for base, weights in arenas.items():
        begins = [w.data_ptr() for w in weights]
        ends = [w.data_ptr() + w.nbytes for w in weights]
        assert ends[-1] - begins[0] <= size or len(weights) == 1
        assert begins[1:] == ends[:-1] and begins[0] >= base  # no gaps, no overlap
        assert ends[-1] <= base + weights[0].untyped_storage().nbytes()
        assert begins[0] % (packing._HUGE_PAGE if ends[-1] - begins[0] >= packing._HUGE_PAGE else 64) == 0


def test_state_dicts_are_plain(model):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    packed = model.pack_weights().state_dict()
    assert list(packed) == list(before) and model.packed
    for name, t in packed.items():
        assert_same_bits(t, before[name])
    inside = torch.nn.ModuleDict({"inner": model}).state_dict()
    assert_same_bits(inside["inner.lm_head.weight"], before["lm_head.weight"])

    changed = {name: t + 1 for name, t in before.items()}
    model.load_state_dict(changed)
    assert not model.packed
    for name, t in model.state_dict().items():
        assert_same_bits(t, changed[name])


def test_a_copy_is_packed_too(model):
    model.pack_weights()
    idx = torch.randint(64, (1, 5))
    other = copy.deepcopy(model)
    assert other.packed
    assert_same_bits(logits(other, idx), logits(model, idx))
    other.unpack_weights()
    assert model.packed and not other.packed


def test_another_dtype_unpacks(model):
    idx = torch.randint(64, (1, 5))
    plain = copy.deepcopy(model).to(torch.bfloat16)
    moved = model.pack_weights().to(torch.bfloat16)
    assert not moved.packed
    assert_same_bits(logits(moved, idx), logits(plain, idx))


@torch.inference_mode()
def test_a_model_made_in_inference_mode(model):
    other = copy.deepcopy(model)
    idx = torch.randint(64, (1, 5))
    assert other.lm_head.weight.is_inference()
    assert_same_bits(logits(other.pack_weights(), idx), logits(model, idx))
    assert_same_bits(logits(other.unpack_weights(), idx), logits(model, idx))


@pytest.mark.parametrize("bad", [-1, 67, 79, 80])  # 67 to 79 are padding
@pytest.mark.parametrize("kind", ["gpt", "llama-tied", "llama"])
def test_an_id_without_a_row_is_an_error(kind, bad):
    model = MODELS[kind]().requires_grad_(False).pack_weights()
    with pytest.raises(IndexError):
        model(torch.tensor([[1, bad]]))


def test_embed_of_nothing():
    table = MODELS["llama-tied"]().pack_weights().embed
    assert packing.embed(table, torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 32)


def test_explain_takes_a_packed_model(model):
    prompt = [1, 2, 3, 4]
    plain = explain(model, prompt)
    packed = explain(model.pack_weights(), prompt)
    assert_same_bits(packed.output, plain.output)
    assert_same_bits(packed.weights, plain.weights)


@pytest.mark.parametrize("pack", [True, False])
def test_the_engine_packs_unless_told_not_to(model, pack):
    prompts = [[1, 2, 3], [4], [5] * 20]
    params = [SamplingParams(max_new_tokens=6, temperature=t, seed=3) for t in (0.0, 0.8, 0.0)]
    plain = [c.tokens for c in generate(copy.deepcopy(model), prompts, params, pack=False)]
    assert [c.tokens for c in generate(model, prompts, params, pack=pack)] == plain
    assert model.packed == pack
    assert Engine(model, pack=False).model.packed == pack  # what is packed stays so


def test_other_linears_are_left_alone():
    model = MODELS["gpt"]().eval()
    model.adapter = torch.nn.Linear(32, 32)
    model.pack_weights()
    assert model.packed and model.adapter.weight.dim() == 2


def test_embedding_untied_after_packing():
    model = MODELS["gpt"]().eval().pack_weights()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(67, 32))
    assert model.packed
    state = model.state_dict()
    assert state["transformer.wte.weight"].shape == (67, 32)
    model.load_state_dict(state)
    assert not model.packed and model.transformer.wte.weight.shape == (67, 32)


@pytest.mark.parametrize("name", ["gpt", "llama-tied"])
@torch.no_grad()
def test_packed_compiles_and_exports(name):
    model, idx = MODELS[name]().eval(), torch.tensor([[1, 2, 66]])

    def logits(model):
        out = model(idx)
        return out[0] if isinstance(out, tuple) else out

    expected = logits(model)
    model.pack_weights()
    assert_same_bits(logits(torch.compile(model, fullgraph=True, backend="eager")), expected)
    assert_same_bits(logits(torch.export.export(model, (idx,)).module()), expected)


def test_autocast_of_a_packed_engine():
    """The engine packs by default: what worked with plain weights works."""
    model = MODELS["gpt"]().eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3]]))[0]
        assert_same_bits(model.pack_weights()(torch.tensor([[1, 2, 3]]))[0], expected)
