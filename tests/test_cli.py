"""The command line as a user runs it: processes, exit status, stdout and stderr."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attn_ext import smollm2
from attn_ext.llama import Llama, LlamaConfig
from attn_ext.nanogpt import GPT, GPTConfig
from attn_ext_cli import main

tokenizers = pytest.importorskip("tokenizers")

# The installed console script where there is one (an environment that runs from the source folder may have none).
SCRIPT = shutil.which("attn-ext", path=str(Path(sys.executable).parent))
COMMAND = [SCRIPT] if SCRIPT else [sys.executable, "-m", "attn_ext_cli"]
SUMMARY = re.compile(
    r"(\d+) tokens?, [\d.]+ tokens/s, first token after [\d.]+ s.*\n"
    r"KV cache: at most (\d+) of (\d+) blocks? used, .*(\d+) prompt tokens? reused, (\d+) preemptions?\n$"
)


def run(*arguments, status=0, **options):
    """-> the finished process; it must end with `status`, print no traceback and, in a pipe, no terminal codes."""
    result = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and "\x1b" not in result.stdout + result.stderr
    return result


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Like `run`, in this process, which has imported torch already: for what is the same in one of its own."""

    def run_here(*arguments, status=0):
        monkeypatch.setattr(sys, "argv", ["attn-ext", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert end.value.code == status, out + err
        return subprocess.CompletedProcess(arguments, status, out, err)

    return run_here


def save_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges -> its vocabulary size."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return len(alphabet)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny random Llama-family model in a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(save_tokenizer(folder), 32, 48, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=4096)
    torch.manual_seed(0)
    model = Llama(config)
    tensors = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    tensors["lm_head.weight"] = model.lm_head.weight
    for i, block in enumerate(model.layers):
        q, k, v = (block.attn.wqkv.weight * 20).split([32, 16, 16])
        layer = {
            "input_layernorm": block.norm_1.weight, "post_attention_layernorm": block.norm_2.weight,
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": block.attn.wo.weight, "mlp.gate_proj": block.mlp.gate.weight,
            "mlp.up_proj": block.mlp.up.weight, "mlp.down_proj": block.mlp.down.weight,
        }  # fmt: skip
        tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    settings = {
        "model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random nanoGPT checkpoint with a tokenizer.json beside it."""
    folder = tmp_path_factory.mktemp("nanogpt")
    arguments = {"block_size": 64, "vocab_size": save_tokenizer(folder), "n_layer": 2, "n_head": 2, "n_embd": 16}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**arguments))
    torch.save({"model": model.state_dict(), "model_args": arguments}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


# ------------------------------------------------------------------------------------------------------- generate


def test_the_readme_command():
    """With the real model: fetched the first time, from the cache folder afterwards."""
    result = subprocess.run(
        [*COMMAND, "generate", "The capital of France is"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout and "\x1b" not in result.stdout
    assert SUMMARY.search(result.stderr)


def test_text_goes_to_stdout_and_the_summary_to_stderr(llama, run_here):
    result = run("generate", "My hobby is", "--model", llama, "-n", 20)
    assert result.stdout.startswith("My hobby is") and result.stdout.endswith("\n")
    tokens, peak, blocks, reused, preemptions = map(int, SUMMARY.search(result.stderr).groups())
    assert (tokens, peak, reused, preemptions) == (20, 2, 0, 0) and blocks >= peak
    assert "ended at the length limit" in result.stderr
    quiet = run_here("generate", "My hobby is", "--model", llama, "-n", 20, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_sampling_repeats_with_a_seed(checkpoint, run_here):
    options = ["generate", "ab", "-m", checkpoint, "-n", 12, "--temperature", 1, "--top-k", 50, "--top-p", 0.95, "-q"]
    first, again, other = (run_here(*options, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_stop_dtype_and_stdin(llama, run_here):
    text = run("generate", "-", "-m", llama, "-n", 20, "-q", "--dtype", "bfloat16", input="My hobby").stdout
    assert text.startswith("My hobby")
    new = text.removeprefix("My hobby").rstrip("\n")
    stop = next(new[i : i + 2] for i in range(1, len(new)) if "\ufffd" not in new[i : i + 2])
    stopped = run_here(
        "generate", "My hobby", "-m", llama, "-n", 20, "-q", "--dtype", "bfloat16", "--stop", stop
    ).stdout
    assert stopped == "My hobby" + new[: new.index(stop)] + "\n"


def test_prompts_file_gives_what_each_prompt_gives_alone(llama, tmp_path, run_here):
    prompts = ["My hobby is", "The same beginning, one", "The same beginning, two"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n")
    # One prompt has room at a time or two: they wait, share the beginning, and come out in their order.
    result = run("generate", "--prompts-file", file, "-m", llama, "-n", 8, "--block-size", 4, "--num-blocks", 12)
    answers = re.fullmatch("\n".join(rf"> {prompt}\n(.*)\n" for prompt in prompts), result.stdout, re.S).groups()
    alone = [run_here("generate", p, "-m", llama, "-n", 8, "-q").stdout.removeprefix(p).strip() for p in prompts]
    assert [answer.strip() for answer in answers] == alone
    assert int(SUMMARY.search(result.stderr)[1]) == 24
    assert "3 ended at the length limit" in result.stderr


@pytest.fixture
def broken(checkpoint, tmp_path) -> Path:
    """The nanoGPT checkpoint with a NaN in every projection."""
    shutil.copy(checkpoint.parent / "tokenizer.json", tmp_path)
    content = torch.load(checkpoint)
    for name, tensor in content["model"].items():
        if name.endswith("c_attn.weight"):
            tensor[:, 0] = torch.nan
    torch.save(content, tmp_path / "broken.pt")
    return tmp_path / "broken.pt"


def test_a_failed_prompt_is_said(broken, tmp_path, run_here):
    result = run_here("generate", "a", "-m", broken, "-q", status=1)
    assert re.fullmatch("attn-ext generate: .*logits are not finite\n", result.stderr)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    result = run_here("generate", "--prompts-file", tmp_path / "prompts.txt", "-m", broken, "-q", status=1)
    assert result.stderr.startswith("attn-ext generate: 2 of 2 prompts failed, the first: ")


def test_explain_shows_what_is_not_a_number(broken, tmp_path, run_here):
    text = run_here("explain", "a" * 40, "-m", broken, "--head", 0).stdout
    rows = re.findall(r"^ +a  (\?+) *$", text, re.M)
    assert [len(row) for row in rows] == [*range(1, 41)] * 2 + [8] * 40  # scores, weights; the outputs of 8 channels
    assert "nan" in run_here("explain", "ab", "-m", broken).stdout
    for name in ("a.png", "a.html"):
        run_here("explain", "ab", "-m", broken, "-o", tmp_path / name)


def test_full_cache_is_said(llama, run_here):
    result = run_here("generate", "abcdef", "-m", llama, "-n", 50, "--num-blocks", 2, "--block-size", 4)
    assert "ended because the cache is full" in result.stderr


def test_interrupt_is_clean_and_text_comes_while_it_is_made(llama):
    process = subprocess.Popen(
        [*COMMAND, "generate", "My hobby", "-m", str(llama), "-n", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    begun = process.stdout.read(20)  # returns as soon as there are 20 bytes: 12 tokens of 4000
    assert process.poll() is None, "the text came only at the end"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert begun.startswith(b"My hobby") and out.endswith(b"\n")
    assert b"Traceback" not in err and SUMMARY.search(err.decode())


def test_a_reader_that_closes_early_is_no_error(llama):
    command = " ".join([*COMMAND, "generate", "hobby", "-m", str(llama), "-n", "500", "-q"])
    result = subprocess.run(["bash", "-c", f"{command} | head -c 10"], capture_output=True, timeout=120)
    assert len(result.stdout) == 10 and result.stderr == b""


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("generate", "give either a prompt or --prompts-file"),
        ("generate +", "the prompt is empty"),
        ("generate --prompts-file none.txt", "--prompts-file none.txt: No such file or directory"),
        ("generate a -m none.gguf", "none.gguf: no such file"),
        ("generate a -m ./none", "./none: no such file or directory"),
        ("generate a --dtype int8", "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("generate a --top-p 2", "SamplingParams: top_p must be above 0 and at most 1, or None for no limit, got 2.0"),
        ("explain a -o a.gif", "--output must end in .png or .html, got a.gif"),
        ("check --backend abacus", "backend must be one of .*scalar, got 'abacus'"),
        (
            "bench --op conv",
            "op must be one of linear, norm, attention, paged_attention, masked_softmax, model, growth, memory, "
            "values, got 'conv'",
        ),
        (
            "bench --op model --peer onnx",
            "peer must be one of transformers, vllm, openvino_genai, llama_cpp, ctranslate2 or none, got 'onnx'",
        ),
    ],
)
def test_a_users_mistake_is_one_line(arguments, message, run_here):
    command, *rest = (argument.replace("+", " ") for argument in arguments.split())
    result = run_here(command, *rest, status=1)
    assert re.fullmatch(f"attn-ext {command}: {message}\n", result.stderr) and result.stdout == ""


def test_mistakes_that_need_a_model(llama, checkpoint, tmp_path, run_here):
    def error(*arguments):
        return run_here(*arguments, status=1).stderr

    shutil.copy(checkpoint, tmp_path / "ckpt.pt")
    assert error("generate", "a", "-m", tmp_path / "ckpt.pt") == (
        f"attn-ext generate: {tmp_path}/ckpt.pt: no tokenizer; put the tokenizer.json it was trained with beside it\n"
    )
    assert error("generate", "a" * 70, "-m", checkpoint).endswith("in the model's context of 64, got 70 tokens\n")
    assert error("generate", "a", "-m", llama, "--chat") == "attn-ext generate: chat: this model has no chat template\n"
    assert error("explain", "a", "-m", llama, "--layer", 2) == "attn-ext explain: layer must be in 0 … 1, got 2\n"
    assert "300 tokens of 4 heads are too much for a page" in error(
        "explain", "a" * 300, "-m", llama, "-o", tmp_path / "a.html"
    )
    assert error("explain", "a", "-m", llama, "-o", tmp_path / "no/a.html") == (
        f"attn-ext explain: cannot write {tmp_path}/no/a.html: No such file or directory\n"
    )


# What these do ends before torch is imported: a process each costs little.
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--help >&-", "attn-ext: the standard output is closed\n"),
        ("--help >/dev/full", r"attn-ext: \[Errno 28\] No space left on device\n"),
        ("generate - <&-", "attn-ext generate: the prompt: the standard input is closed\n"),
        ("generate 2>&-", ""),
    ],
)
def test_closed_and_full_streams(arguments, message):
    result = subprocess.run(["bash", "-c", f"{' '.join(COMMAND)} {arguments}"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "") and re.fullmatch(message, result.stderr)


def test_no_space_for_the_output(llama, run_here, monkeypatch):
    for command in (["info"], ["generate", "a", "-m", llama, "-n", 2, "-q"]):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            result = run_here(*command, status=1)
        assert result.stderr == f"attn-ext {command[0]}: [Errno 28] No space left on device\n"


def test_text_that_is_not_utf8(llama, run_here, monkeypatch):
    message = r"the text must be UTF-8, got '\udcff' at position 1"
    for arguments in (["generate", "a\udcff"], ["explain", "a\udcff"], ["generate", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", errors="surrogateescape"))
        assert message in run_here(*arguments, "-m", llama, status=1).stderr
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    assert run_here("generate", "-", status=1).stderr == (
        "attn-ext generate: the prompt: the standard input is not UTF-8 text\n"
    )


@pytest.mark.parametrize("columns", [0, 1])
def test_a_terminal_too_narrow_for_anything(llama, run_here, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert torch.__version__.split("+")[0] in run_here("info").stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    assert "weights" in run_here("explain", "My hobby", "-m", llama).stdout


def test_a_model_file_that_is_a_folder(tmp_path, run_here, monkeypatch):
    monkeypatch.setenv("ATTN_EXT_CACHE", str(tmp_path))
    (tmp_path / smollm2.FILE).mkdir()
    assert run_here("generate", "a", status=1).stderr == (
        f"attn-ext generate: smollm2: cannot read {tmp_path / smollm2.FILE}: Is a directory\n"
    )


def test_attn_ext_that_cannot_be_imported():
    result = run("info", status=1, env={**os.environ, "ATTN_EXT_BACKEND": "nope"})
    assert re.fullmatch("attn-ext info: .*ATTN_EXT_BACKEND.*'nope'.*\n", result.stderr) and result.stdout == ""


def test_a_wrong_option_is_status_2():
    result = run("generate", "a", "--no-such-option", status=2)
    assert "No such option" in result.stderr


# ------------------------------------------------------------------------------------------------ the other ones


@pytest.mark.parametrize("family", ["llama", "checkpoint"])
def test_explain(family, request, tmp_path, run_here):
    model = request.getfixturevalue(family)
    text = run_here("explain", "My hobby", "-m", model, "--layer", 1, "--head", -1).stdout
    for stage in ("X", "norm", "QKV", "Q", "K", "V", "scores", "scaled", "masked", "weights", "concat", "W_o"):
        assert re.search(rf"^{stage} +\(1,", text, re.M), stage
    assert text.count("view, no copy") == 4 and "head 3" in text if family == "llama" else "head 1" in text
    assert [name for name in ("scores", "weights", "outputs") if f"  {name} = " in text] == [
        "scores",
        "weights",
        "outputs",
    ]
    for name in ("a.png", "a.html"):
        out = tmp_path / name
        assert run_here("explain", "My hobby", "-m", model, "-o", out).stdout.startswith(f"{out}: layer 0, ")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "value-weighted" in (tmp_path / "a.html").read_text()


def test_explain_has_colours_on_a_terminal(llama):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [*COMMAND, "explain", "ab", "-m", str(llama), "--head", "0"]
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    text = b""
    while True:
        try:
            text += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(timeout=60) == 0 and b"\x1b[" in text and b"weights" in text


def test_info():
    import attn_ext

    text = run("info").stdout
    assert attn_ext.__version__ in text and torch.__version__ in text
    assert f"{attn_ext.active_backend()} (active)" in text and all(name in text for name in attn_ext.backends())


def test_check_is_green():
    import attn_ext

    text = run("check", "--threads", 1).stdout
    assert re.search(r"^\d+ checks, all ok$", text, re.M)
    for name in (*attn_ext.backends(), "linear", "attention, causal", "nanogpt, paged", "llama, dense", "float16"):
        assert name in text


def test_check_sees_a_wrong_op(monkeypatch):
    """An op that is off by a thousandth, and one that raises, are failures."""
    import attn_ext
    from attn_ext import check

    right = attn_ext.attention

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out * 1.001, lse

    def broken(*args, **options):
        raise RuntimeError("append_kv: broken")

    monkeypatch.setattr(attn_ext, "attention", wrong)
    monkeypatch.setattr(attn_ext, "append_kv", broken)
    failed = {r.name: r for r in check.run(["scalar"]) if r.dtype == "float32" and not r.ok}
    assert all(name == "append_kv" or name.startswith("attention, ") for name in failed) and len(failed) == 7
    assert failed["append_kv"].problem == "append_kv: broken"


def test_a_failed_check_is_status_1(monkeypatch, capsys):
    import typer

    import attn_ext.check
    from attn_ext_cli.check import check

    results = [attn_ext.check.Result("linear", "float32", "scalar", 1e-3, 1e-6)]
    monkeypatch.setattr(attn_ext.check, "run", lambda backends: iter(results))
    with pytest.raises(typer.Exit) as exit:
        check(backend=None, threads=None)
    assert exit.value.exit_code == 1
    assert "FAILED: linear, float32, scalar: 1.0e-3>1.0e-6 FAILED" in capsys.readouterr().out


def test_help_names_every_command_and_needs_no_torch():
    code = (
        "import sys\nfrom attn_ext_cli import main\nsys.argv = ['attn-ext', '--help']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    text = result.stdout
    assert result.stderr == "False\n"
    assert all(re.search(rf"\b{name}\b", text) for name in ("generate", "explain", "info", "check", "bench"))
