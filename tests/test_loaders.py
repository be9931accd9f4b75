"""Every format a model is read from, and what is said where a file is wrong."""

import dataclasses
import json

import pytest
import torch
from model_helpers import assert_logits_match
from tolerance import assert_same_bits

from attn_ext.loaders import LoadError, load_model
from attn_ext.loaders.gguf_file import half_split_rows
from attn_ext.nanogpt import GPT, GPTConfig

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


def fails(path, message, **options):
    """load_model refuses `path` in one line that holds `message`."""
    with pytest.raises(LoadError) as error:
        load_model(path, **options)
    text = str(error.value)
    assert message in text and "\n" not in text, text


def shaken(model):
    """Random weights that make every part matter (initial biases are 0 and norms 1)."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.15)
    return model.eval()


def edit_json(file, **changes):
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(file, **changes):
    """Set tensors of a safetensors file (`.` written `__`); None removes one."""
    tensors = safetensors_torch.load_file(file)
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    safetensors_torch.save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


# ------------------------------------------------------------------------------------------- nanoGPT checkpoints

ARGS = {"n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 16, "bias": True, "vocab_size": 37, "dropout": 0.1}


@pytest.fixture
def nanogpt():
    return shaken(GPT(GPTConfig(**ARGS))).requires_grad_(False)


def save_checkpoint(path, trained, rename=lambda name: name, **changes):
    state = {rename(name): tensor for name, tensor in trained.state_dict().items()}
    checkpoint = {"model": state, "optimizer": {"state": {}}, "model_args": ARGS, "iter_num": 5}
    checkpoint.update(best_val_loss=torch.tensor(1.5), config={"dataset": "shakespeare_char"}, **changes)
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_nanogpt_checkpoint(tmp_path, nanogpt, compiled):
    rename = (lambda name: f"_orig_mod.{name}") if compiled else (lambda name: name)
    model, tokenizer = load_model(save_checkpoint(tmp_path / "ckpt.pt", nanogpt, rename))
    idx = torch.randint(37, (2, 9))
    assert_same_bits(model(idx)[0], nanogpt(idx)[0])
    assert tokenizer is None and not model.training
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(p.requires_grad for p in model.parameters())
    assert dataclasses.asdict(model.config) == dataclasses.asdict(nanogpt.config)


def test_nanogpt_checkpoint_in_another_dtype(tmp_path, nanogpt):
    model, _ = load_model(save_checkpoint(tmp_path / "ckpt.pt", nanogpt), dtype=torch.bfloat16)
    idx = torch.randint(37, (2, 9))
    assert_same_bits(model(idx)[0], nanogpt.to(torch.bfloat16)(idx)[0])


def test_nanogpt_checkpoint_with_mask_buffers_and_one_name_for_the_head(tmp_path, nanogpt):
    state = {**nanogpt.state_dict(), "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    del state["lm_head.weight"]
    model, _ = load_model(save_checkpoint(tmp_path / "ckpt.pt", nanogpt, model=state))
    idx = torch.randint(37, (2, 9))
    assert_same_bits(model(idx)[0], nanogpt(idx)[0])


def test_nanogpt_checkpoint_errors(tmp_path, nanogpt):
    path, state = tmp_path / "ckpt.pt", nanogpt.state_dict()

    def saved(**changes):
        return save_checkpoint(path, nanogpt, **changes)

    name = "transformer.h.1.attn.c_attn.weight"
    without = {n: t for n, t in state.items() if n != name}
    fails(saved(model=without), f"ckpt.pt: tensor '{name}' is missing")
    fails(
        saved(model={**state, "extra.weight": torch.ones(1)}), "unexpected tensor 'extra.weight' (1 unexpected in all)"
    )
    fails(saved(model={**state, name: torch.ones(24, 72)}), f"tensor '{name}' must have shape (72, 24), got (24, 72)")
    fails(saved(model={**state, "lm_head.weight": torch.ones(37, 24)}), "'lm_head.weight' must equal")
    fails(saved(model_args={**ARGS, "n_experts": 4}), "model_args has the unknown key 'n_experts'")
    fails(saved(model_args={**ARGS, "n_head": 5}), "n_embd must be a multiple of n_head, got n_embd 24 and n_head 5")
    fails(saved(model_args={**ARGS, 5: 1}), "model_args has the unknown key 5")
    fails(
        saved(model_args={**ARGS, "n_layer": "x"}), "ckpt.pt: GPTConfig: n_layer must be a whole number >= 1, got 'x'"
    )
    fails(saved(model_args={**ARGS, "n_embd": torch.eye(2)}), "n_embd must be a whole number >= 1, got tensor(")
    fails(saved(model_args={**ARGS, "n_layer": 10**6}), "must have tensors for 1000000 layers, got 28 tensors in all")
    fails(saved(model_args=None), "must be a dict with a dict 'model_args'")
    fails(saved(model={**state, 5: torch.ones(1)}), "unexpected tensor '5'")
    weight = state[name]
    for wrong, got in [
        (5, "must be a tensor, got int"),
        (weight.to_sparse(), "must be dense and real, got torch.float32, torch.sparse_coo, on cpu"),
        (weight.to(torch.complex64), "must be dense and real, got torch.complex64, torch.strided, on cpu"),
        (weight.to("meta"), "must be dense and real, got torch.float32, torch.strided, on meta"),
    ]:
        fails(saved(model={**state, name: wrong}), f"ckpt.pt: tensor '{name}' {got}")
    torch.save([1, 2], path)
    fails(path, "must be a dict with a dict 'model'")
    whole = saved().read_bytes()
    for content in (b"not a checkpoint", b"", whole[:100], whole[: len(whole) // 2]):
        path.write_bytes(content)
        fails(path, "ckpt.pt: not a file of tensors and plain values")


class Planted:
    """Unpickling this would run code."""

    def __reduce__(self):
        return (open, ("planted", "w"))


def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "model_args": {}, "config": Planted()}, "ckpt.pt")
    # (torch's own words advise to load it with weights_only=False)
    fails("ckpt.pt", "ckpt.pt: not a file of tensors and plain values: damaged, or it holds other objects")
    assert not (tmp_path / "planted").exists()


# ------------------------------------------------------------------------------------------------ Hugging Face GPT-2

GPT2_SHAPES = {
    "plain": {},
    "one-head": {"n_head": 1, "n_embd": 7, "vocab_size": 53},
    "erf-gelu": {"activation_function": "gelu", "n_layer": 1},
    "eps": {"layer_norm_epsilon": 1e-2},
}


def gpt2(**changes):
    sizes = {"vocab_size": 61, "n_positions": 32, "n_embd": 36, "n_layer": 2, "n_head": 3, **changes}
    return shaken(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="sdpa")))


@pytest.mark.parametrize("changes", GPT2_SHAPES.values(), ids=GPT2_SHAPES)
def test_gpt2_logits_are_those_of_transformers(backend, dtype, tmp_path, changes):
    theirs = gpt2(**changes)
    theirs.save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, dtype=dtype)
    idx = torch.randint(theirs.config.vocab_size, (2, 31))
    logits, _ = model(idx, idx)
    assert model.vocab_size == theirs.config.vocab_size
    assert_logits_match(logits, theirs, idx)


def test_gpt2_without_the_prefix_and_with_old_mask_buffers(tmp_path):
    theirs = gpt2()
    theirs.transformer.save_pretrained(tmp_path)  # the body alone: no "transformer." and no head
    edit_tensors(tmp_path / "model.safetensors", h__0__attn__bias=torch.ones(1, 1, 32, 32))
    idx = torch.randint(61, (2, 31))
    assert_logits_match(load_model(tmp_path)[0](idx, idx)[0], theirs, idx)


def test_gpt2_in_shards_and_pickled(tmp_path):
    theirs = gpt2()
    idx = torch.randint(61, (2, 31))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one = load_model(tmp_path / "shards")[0](idx, idx)[0]
    assert_logits_match(one, theirs, idx)
    theirs.config.save_pretrained(tmp_path / "pickled")
    torch.save(theirs.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    assert_same_bits(load_model(tmp_path / "pickled")[0](idx, idx)[0], one)
    torch.save([1], tmp_path / "pickled" / "pytorch_model.bin")
    fails(tmp_path / "pickled", "pytorch_model.bin: must hold a dict of tensors, got list")


def test_gpt2_errors(tmp_path):
    gpt2().save_pretrained(tmp_path)
    config, tensors = tmp_path / "config.json", tmp_path / "model.safetensors"
    good = config.read_text()
    for changes, message in [
        (
            {"activation_function": "relu"},
            "activation_function must be one of ['gelu', 'gelu_new', 'gelu_pytorch_tanh']",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, got True"),
        ({"n_inner": 10}, "n_inner must be 4 * n_embd (144), got 10"),
        ({"n_layer": None}, "config.json: key 'n_layer' is missing"),
        ({"vocab_size": 60}, "tensor 'transformer.wte.weight' must have shape (60, 36), got (61, 36)"),
        ({"n_layer": 1}, "unexpected tensor 'transformer.h.1."),
        ({"n_head": 5}, "n_embd must be a multiple of n_head"),
    ]:
        edit_json(config, **changes)
        fails(tmp_path, message)
        config.write_text(good)
    edit_tensors(tensors, transformer__h__0__attn__c_attn__weight=torch.ones(108, 36))  # as nn.Linear has it
    fails(tmp_path, "tensor 'transformer.h.0.attn.c_attn.weight' must have shape (36, 108), got (108, 36)")
    edit_tensors(tensors, transformer__h__0__attn__c_attn__weight=None)
    fails(tmp_path, "tensor 'transformer.h.0.attn.c_attn.weight' is missing")
    tensors.write_bytes(b"junk")
    fails(tmp_path, "model.safetensors: not a safetensors file")
    tensors.unlink()
    fails(tmp_path, "no model.safetensors, model.safetensors.index.json or pytorch_model.bin")


def test_gpt2_with_an_untied_head_is_refused(tmp_path):
    gpt2().save_pretrained(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lm_head__weight=torch.ones(61, 36))
    fails(tmp_path, "tensor 'lm_head.weight' must equal 'transformer.wte.weight' (a tied head)")


# ------------------------------------------------------------------------------------------------ Llama directories


def llama(kind="Llama", **changes):
    sizes = {
        "vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes, attn_implementation="sdpa")
    return shaken(getattr(transformers, f"{kind}ForCausalLM")(config))


def test_llama_in_shards(tmp_path):
    theirs = llama()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    idx = torch.randint(67, (2, 31))
    assert_logits_match(load_model(tmp_path)[0](idx), theirs, idx)
    shards[0].unlink()
    fails(tmp_path, f"{shards[0].name}: the shard is missing")
    edit_json(tmp_path / "model.safetensors.index.json", weight_map={"a": 5})
    fails(tmp_path, "index.json: 'weight_map' must be an object of file names, got {'a': 5}")


def test_llama_config_as_older_files_write_it(tmp_path):
    """rope_theta and rope_scaling at the top, and no head_dim."""
    theirs = llama(
        rope_parameters={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 500.0,
        }
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    rope = json.loads(config.read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_json(config, rope_parameters=None, rope_theta=theta, rope_scaling=rope, head_dim=None)
    idx = torch.randint(67, (2, 31))
    assert_logits_match(load_model(tmp_path)[0](idx), theirs, idx)
    del rope["factor"]
    edit_json(config, rope_scaling=rope)
    fails(tmp_path, "llama3 rope scaling needs the key 'factor'")


def test_llama_errors(tmp_path):
    llama().save_pretrained(tmp_path)
    config, tensors = tmp_path / "config.json", tmp_path / "model.safetensors"
    good = config.read_text()
    k_proj = "model.layers.1.self_attn.k_proj.weight"
    for changes, message in [
        ({"model_type": "mamba"}, "model_type must be one of ('gpt2', 'llama', 'mistral', 'qwen2'), got 'mamba'"),
        ({"model_type": None}, "got None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling must be 'default' or 'llama3', got 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"hidden_size": None}, "config.json: key 'hidden_size' is missing"),
        ({"vocab_size": "x"}, "config.json: key 'vocab_size' must be a whole number >= 1, got 'x'"),
        ({"num_attention_heads": 0}, "config.json: key 'num_attention_heads' must be a whole number >= 1, got 0"),
        ({"num_key_value_heads": 0}, "config.json: key 'num_key_value_heads' must be a whole number >= 1, got 0"),
        ({"max_position_embeddings": 10**12}, "config.json: LlamaConfig: max_seq_len must be at most 16777216"),
        ({"rms_norm_eps": "a"}, "config.json: LlamaConfig: norm_eps must be a number above 0, got 'a'"),
        ({"rope_parameters": {"rope_theta": 0}}, "LlamaConfig: rope_theta must be a number above 0, got 0"),
        ({"rope_scaling": "x"}, "config.json: rope_scaling must be an object or null, got 'x'"),
        ({"num_hidden_layers": 10**6}, "must have tensors for 1000000 layers, got 21 tensors in all"),
        ({"num_key_value_heads": 3}, "n_heads must be a multiple of n_kv_heads"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight' must have shape (16, 32), got (8, 32)"),
        ({"attention_bias": True}, "tensor 'model.layers.0.self_attn.q_proj.bias' is missing"),
        ({"num_hidden_layers": 1}, "unexpected tensor 'model.layers.1."),
    ]:
        edit_json(config, **changes)
        fails(tmp_path, message)
        config.write_text(good)
    config.write_text("{")
    fails(tmp_path, "config.json: not valid JSON")
    config.write_text("[]")
    fails(tmp_path, "config.json: must hold a JSON object, got list")
    config.write_text(good)
    edit_tensors(tensors, **{k_proj.replace(".", "__"): None})
    fails(tmp_path, f"tensor '{k_proj}' is missing")
    config.unlink()
    fails(tmp_path, "no config.json")


def test_qwen2_with_mixed_windows_is_refused(tmp_path):
    llama("Qwen2").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", use_sliding_window=True)
    fails(tmp_path, "use_sliding_window must be false")


# -------------------------------------------------------------------------------------------------------------- GGUF

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def interleaved(weight, heads):
    """Rows of one rotary projection as llama.cpp wants them: (first half, second half) of a head become pairs."""
    first, second = weight.reshape(heads, 2, -1, *weight.shape[1:]).unbind(1)
    return torch.stack([first, second], dim=2).reshape(weight.shape)


def write_gguf(path, theirs, architecture="llama", kind=None, without=(), extra=None, **fields):
    """transformers' model as a GGUF file; `kind` quantises the matrices, `without` leaves keys and tensors out."""
    c = theirs.config
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads, **fields,
    }  # fmt: skip
    for key, value in keys.items():
        if key in without:
            continue
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", c.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", c.rope_parameters["rope_theta"])
    tensors = {}
    for name, tensor in theirs.state_dict().items():
        module, part = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            layer, inner = module.removeprefix("model.layers.").split(".", 1)
            module = f"blk.{layer}.{GGUF_NAMES[inner]}"
            if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = c.num_attention_heads if "q_proj" in inner else c.num_key_value_heads
                tensor = interleaved(tensor, heads)
        else:
            module = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[module]
        tensors[f"{module}.{part}"] = tensor
    if c.tie_word_embeddings:
        tensors.pop("output.weight", None)
    for name, tensor in {**tensors, **(extra or {})}.items():
        if name in without:
            continue
        data = tensor.numpy()
        if kind is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GGUF_MODELS = {
    "ratio4": ("llama", {}),
    "ratio2": ("llama", {"num_attention_heads": 4}),  # here permuting k by heads // kv_heads would go unseen
    "ratio1": ("llama", {"num_key_value_heads": 8}),
    "bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "head-dim": ("llama", {"head_dim": 6}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
}


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_gguf_logits_are_those_of_transformers(backend, tmp_path, name):
    architecture, changes = GGUF_MODELS[name]
    theirs = llama(architecture.capitalize(), **changes)
    head_dim = {"attention.key_length": 6, "attention.value_length": 6} if name == "head-dim" else {}
    model, tokenizer = load_model(write_gguf(tmp_path / "model.gguf", theirs, architecture, **head_dim))
    assert tokenizer is None
    idx = torch.randint(67, (2, 31))
    assert_logits_match(model(idx), theirs, idx)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_half_split_rows_undoes_llama_cpps_order(heads):
    weight = torch.randn(heads * 6, 5)
    assert torch.equal(half_split_rows(interleaved(weight, heads), heads), weight)
    assert torch.equal(half_split_rows(interleaved(weight[:, 0], heads), heads), weight[:, 0])
    assert not torch.equal(interleaved(weight, heads), weight)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_tensors_are_dequantised(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    theirs = llama(intermediate_size=64)
    path = write_gguf(tmp_path / "model.gguf", theirs, kind=kind)
    for name, p in theirs.named_parameters():  # the model that the file then holds
        if p.dim() == 2:
            data = p.detach()
            heads = {"q_proj": 8, "k_proj": 2}.get(name.split(".")[-2])
            stored = data if heads is None else interleaved(data, heads)
            stored = torch.from_numpy(gguf.dequantize(gguf.quantize(stored.numpy(), kind), kind).copy())
            p.data = stored if heads is None else half_split_rows(stored, heads)
    idx = torch.randint(67, (2, 31))
    assert_logits_match(load_model(path)[0](idx), theirs, idx)


def test_gguf_with_llama3_rope(tmp_path):
    from attn_ext.llama import llama3_rope_factors

    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = llama(
        num_attention_heads=4,
        rope_parameters={
            **rope, "rope_type": "llama3", "original_max_position_embeddings": 64, "rope_theta": 500.0
        },
    )  # fmt: skip
    factors = torch.tensor(llama3_rope_factors(8, 500.0, **rope, original_max_seq_len=64))
    path = write_gguf(tmp_path / "model.gguf", theirs, extra={"rope_freqs.weight": factors})
    idx = torch.randint(67, (2, 31))
    assert_logits_match(load_model(path)[0](idx), theirs, idx)


def test_gguf_errors(tmp_path):
    path, theirs = tmp_path / "model.gguf", llama()
    k = "blk.1.attn_k.weight"
    wrong = torch.ones(32, 8)
    for options, message in [
        ({"architecture": "mamba"}, "architecture must be one of ('llama', 'qwen2'), got 'mamba'"),
        ({"without": ["block_count"]}, "key 'llama.block_count' is missing"),
        ({"without": [k]}, f"tensor '{k}' is missing"),
        ({"without": ["token_embd.weight"]}, "tensor 'token_embd.weight' is missing"),
        ({"extra": {k: wrong}}, f"tensor '{k}' must have shape (8, 32), got (32, 8)"),
        ({"extra": {"blk.0.odd.weight": wrong}}, "unexpected tensor 'blk.0.odd.weight'"),
        ({"rope.scaling.type": "yarn"}, "key 'llama.rope.scaling.type' must be 'none', got 'yarn'"),
        ({"rope.dimension_count": 2}, "key 'llama.rope.dimension_count' must be the head_dim 4, got 2"),
        ({"expert_count": 8}, "key 'llama.expert_count' must be 0"),
        ({"attention.head_count": 0}, "key 'llama.attention.head_count' must be a whole number >= 1, got 0"),
        ({"block_count": "x"}, "model.gguf: key 'llama.block_count' must be a whole number >= 1, got 'x'"),
        ({"attention.head_count_kv": 3}, "n_heads must be a multiple of n_kv_heads"),
    ]:
        fails(write_gguf(path, theirs, **options), message)
    path.write_bytes(b"GGU")
    fails(path, "model.gguf: not a GGUF file")
    path.write_bytes(b"not a GGUF file at all, but long enough")
    fails(path, "model.gguf: not a GGUF file")


# -------------------------------------------------------------------------------------------------------- tokenizers


def save_tokenizer(directory, **settings):
    """A tokenizer.json of five words, the last two special, and its tokenizer_config.json."""
    words = {"my": 0, "hobby": 1, "is": 2, "<s>": 3, "<end>": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="is"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "<end>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def test_tokenizer_of_a_directory(tmp_path):
    llama().save_pretrained(tmp_path)
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}<end>"
    save_tokenizer(tmp_path, bos_token="<s>", eos_token={"content": "<end>"}, chat_template=template)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 2]}))
    edit_json(tmp_path / "config.json", eos_token_id=4)
    _, tokenizer = load_model(tmp_path)
    assert tokenizer.encode("my hobby") == [3, 0, 1]
    assert tokenizer.decode([3, 0, 1, 4]) == "my hobby"
    assert tokenizer.eos_ids == (4, 2)
    assert tokenizer.vocab_size == 5
    assert tokenizer.chat([{"role": "my", "content": "hobby"}]) == [3, 0, 1, 4]  # one <s>: the template's
    assert tokenizer.chat("hobby") == [3, 2, 1, 4]  # "user" is not among the five words
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no roles') }}")
    with pytest.raises(ValueError, match="chat: the model's chat template failed: no roles"):
        load_model(tmp_path)[1].chat("hobby")


def test_a_chat_template_cannot_reach_the_machine(tmp_path):
    llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="chat: the model's chat template failed"):
        load_model(tmp_path)[1].chat("hobby")


def test_chat_without_a_template(tmp_path):
    llama().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="chat: this model has no chat template"):
        load_model(tmp_path)[1].chat("hobby")


def test_tokenizer_beside_a_nanogpt_checkpoint(tmp_path, nanogpt):
    path = save_checkpoint(tmp_path / "ckpt.pt", nanogpt)
    save_tokenizer(tmp_path)
    assert load_model(path)[1].encode("is") == [3, 2]


def test_tokenizer_errors(tmp_path):
    llama(vocab_size=4).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    fails(tmp_path, "tokenizer.json: has 5 tokens, the model only 4")
    (tmp_path / "tokenizer.json").write_text("{}")
    fails(tmp_path, "tokenizer.json cannot be read")
    save_tokenizer(tmp_path)
    for content, message in [("[]", "must hold a JSON object, got list"), ("{", "is not valid JSON")]:
        (tmp_path / "tokenizer_config.json").write_text(content)
        fails(tmp_path, f"{tmp_path}: tokenizer_config.json {message}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{}]}')  # what no check foresees
    fails(tmp_path, f"{tmp_path}: cannot be loaded: KeyError: 'name'")


# ----------------------------------------------------------------------------------------------------- names and paths


def test_names_that_are_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails(tmp_path / "absent.gguf", "absent.gguf: no such file")
    fails("absent.pt", "absent.pt: no such file")
    fails(tmp_path / "absent", "absent: no such file or directory")
    (tmp_path / "model.onnx").write_bytes(b"")
    fails(tmp_path / "model.onnx", "model.onnx: a model file must end in .gguf or .pt")
    fails("~nobody-of-this-name/model", "~nobody-of-this-name/model: cannot be loaded: RuntimeError: ")
    fails("x" * 5000, "File name too long")
    fails("nobody/no-such-model", "nobody/no-such-model: neither a file or directory here nor to be had from the hub")


def test_hub_name(tmp_path, monkeypatch):
    """The hub's answer is a directory like any other; only what is read is asked for."""
    theirs = llama()
    theirs.save_pretrained(tmp_path)
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    idx = torch.randint(67, (1, 5))
    assert_logits_match(load_model("someone/model")[0](idx), theirs, idx)
    assert asked == [
        (
            "someone/model",
            {"allow_patterns": ["*.json", "*.jinja", "*.safetensors"], "ignore_patterns": ["*/*"]},
        )
    ]
