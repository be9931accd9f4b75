"""`attn_ext.explain`: its stages are those of the model's real forward, and the pictures show them."""

import io
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from tolerance import assert_as_accurate_as_torch

from attn_ext import reference
from attn_ext.explain import _GPT, _stages, explain, reference_logits
from attn_ext.llama import Llama, LlamaConfig
from attn_ext.nanogpt import GPT, GPTConfig
from attn_ext_cli.render_html import save_html
from attn_ext_cli.render_png import save_png
from attn_ext_cli.render_text import print_text

TOKENS = [5, 3, 8, 3, 1, 9, 14]
LABELS = ["My", "·hobby", "·is", "<b>&", "[red]", "$x_1$", "↵"]


def scaled(model):
    """The usual small initial weights would make every head almost uniform."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    return model.eval()


def gpt(**options):
    torch.manual_seed(0)
    return scaled(GPT(GPTConfig(block_size=16, vocab_size=20, n_layer=3, n_head=3, n_embd=24, **options)))


def llama(**options):
    torch.manual_seed(0)
    return scaled(Llama(LlamaConfig(20, 24, 40, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=8, **options)))


MODELS = {
    "nanogpt": gpt,
    "gpt-2": lambda: gpt(activation="gelu_tanh"),
    "nanogpt without bias": lambda: gpt(bias=False),
    "llama": llama,
    "llama with biases": lambda: llama(qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama with a window": lambda: llama(sliding_window=3),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def blocks_of(model):
    return model.transformer.h if isinstance(model, GPT) else model.layers


@torch.no_grad()
def real_forward(model, layer):
    """What the model itself computes in one layer: its input, what its attention and the whole layer give."""
    found, block = {}, blocks_of(model)[layer]
    hooks = [
        block.register_forward_hook(lambda module, args, out: found.update(x=args[0], output=out)),
        block.attn.register_forward_hook(lambda module, args, out: found.update(after_attention=out)),
    ]
    model(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_stages_are_those_of_the_real_forward(model, layer, dtype):
    model.to(dtype)
    ours = explain(model, TOKENS, layer=layer)
    with reference.precision(torch.float64):
        exact = explain(model, TOKENS, layer=layer)
    with reference.precision(dtype):
        plain = explain(model, TOKENS, layer=layer)
    for name, real in real_forward(model, layer).items():
        assert_as_accurate_as_torch(real, getattr(exact, name), getattr(plain, name), what=f"the model's {name}")
        assert_as_accurate_as_torch(getattr(ours, name), getattr(exact, name), getattr(plain, name), what=name)


def test_a_wrong_weight_would_be_seen(model):
    """The comparison above can fail: another output projection gives another layer."""
    before = explain(model, TOKENS, layer=1)
    attn = blocks_of(model)[1].attn
    (attn.c_proj if isinstance(model, GPT) else attn.wo).weight.data[0, 0] += 1
    assert not torch.allclose(before.output, real_forward(model, 1)["output"], rtol=1e-3)


def test_reference_logits_are_the_models(model):
    with torch.no_grad():
        out = (
            model(torch.tensor([TOKENS]), torch.tensor([TOKENS]))
            if isinstance(model, GPT)
            else model(torch.tensor([TOKENS]))
        )
    logits = out[0][0] if isinstance(model, GPT) else out[0]
    torch.testing.assert_close(reference_logits(model, TOKENS), logits, rtol=1e-4, atol=1e-4)


def test_stage_by_stage(model):
    e = explain(model, torch.tensor(TOKENS), layer=1)
    n, d = len(TOKENS), e.q.shape[-1]
    q, k = e.rotated or (e.q, e.k)
    keys = k.repeat_interleave(e.n_heads // e.n_kv_heads, 2)
    values = e.v.repeat_interleave(e.n_heads // e.n_kv_heads, 2)
    window = getattr(blocks_of(model)[1].attn, "window", None)
    for head in range(e.n_heads):
        assert torch.equal(k[0, :, e.kv_head(head)], keys[0, :, head])
        scores = q[0, :, head] @ keys[0, :, head].T
        torch.testing.assert_close(e.scores[0, head], scores)
        torch.testing.assert_close(e.scaled[0, head], scores / math.sqrt(d))
        visible = torch.ones(n, n).tril().bool()
        if window is not None:
            visible &= torch.ones(n, n).triu(-window[0]).bool()
        assert torch.equal(e.visible(head), visible)
        weights = (scores / math.sqrt(d)).masked_fill(~visible, -torch.inf).softmax(-1)
        torch.testing.assert_close(e.weights[0, head], weights)
        torch.testing.assert_close(e.head_outputs[0, head], weights @ values[0, :, head])
    torch.testing.assert_close(e.after_attention, e.x + e.projected)


def test_splitting_and_concat_are_views(model):
    e = explain(model, TOKENS)
    memory = e.qkv.untyped_storage().data_ptr()
    assert [t.untyped_storage().data_ptr() for t in (e.q, e.k, e.v)] == [memory] * 3
    assert e.concat.untyped_storage().data_ptr() == e.head_outputs.untyped_storage().data_ptr()
    notes = {stage.name: stage.note for stage in e.stages()}
    assert all(notes[name].startswith("view, no copy") for name in ("Q", "K", "V", "concat"))


def test_worked_example():
    """Two tokens, d_model 2, one head: the numbers of a hand calculation."""
    model = GPT(GPTConfig(block_size=2, vocab_size=2, n_layer=1, n_head=1, n_embd=2)).eval()
    attn, x = model.transformer.h[0].attn, torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    attn.c_attn.weight.data = torch.tensor([[1.0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, -1]]).T
    attn.c_attn.bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    layer = _GPT.layer(model, 0)
    layer.norm_1 = lambda t: t  # the example has none
    stages = _stages(layer, x[None], 1, 1)
    torch.testing.assert_close(stages["scores"][0, 0], torch.tensor([[5.61, 12.21], [13.01, 27.61]]))
    torch.testing.assert_close(stages["weights"][0, 0], torch.tensor([[1, 0], [3.28423457e-05, 9.99967158e-01]]))
    torch.testing.assert_close(stages["head_outputs"][0, 0], torch.tensor([[3.5, -0.4], [7.49986863, -0.4]]))


def test_heads_and_layers_can_be_chosen(model):
    assert explain(model, TOKENS, layer=-1).layer == 2
    assert explain(model, TOKENS).heads == tuple(range(model.n_heads))
    assert explain(model, TOKENS, head=-1).heads == (model.n_heads - 1,)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layer": 3}, "explain: layer must be in 0 … 2, got 3"),
        ({"head": 3}, "explain: head must be in 0 … 2, got 3"),
        ({"tokens": []}, r"explain: tokens must be one sequence of 1 … 16 token ids, got shape \(0,\)"),
        ({"tokens": [1] * 17}, r"explain: tokens must be one sequence of 1 … 16 token ids, got shape \(17,\)"),
        ({"tokens": [20]}, r"explain: tokens must be in 0 … 19, got \[20\]"),
        ({"tokens": [-1]}, r"explain: tokens must be in 0 … 19, got \[-1\]"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        explain(gpt(), **{"tokens": TOKENS, **arguments})


def test_another_model_is_refused():
    with pytest.raises(TypeError, match="model must be a nanogpt.GPT or a llama.Llama, got Linear"):
        explain(torch.nn.Linear(2, 2), TOKENS)


# ------------------------------------------------------------------------------------------------------- pictures


@pytest.fixture(params=["nanogpt", "llama with a window"])
def explanation(request):
    return explain(MODELS[request.param](), TOKENS, layer=1)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("colours", [False, True])
def test_text(explanation, width, colours):
    out = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=colours,
        color_system="truecolor" if colours else None,
    )  # fmt: skip
    print_text(explanation, LABELS, "My hobby [is]", out)
    assert ("\x1b" in out.file.getvalue()) == colours
    text = out.export_text()
    assert "My hobby [is]" in text and all(label in text for label in LABELS)
    for stage in explanation.stages():
        assert re.search(rf"^{re.escape(stage.name)} .*\({','.join(map(str, stage.shape))}\)", text, re.M), stage.name
    for head in explanation.heads:
        assert re.search(rf"^head {head}\b", text, re.M)
    for name in ("scores", "weights", "outputs"):
        assert len(re.findall(rf"^ *{name} = ", text, re.M)) == explanation.n_heads
    if width == 200:
        row = explanation.weights[0, 1, -1][explanation.visible(1)[-1]]
        assert re.search(
            r"^ +↵ +" + " +".join(["-?"] * (len(TOKENS) - len(row)) + [f"{x:.2f}" for x in row]), text, re.M
        )


def test_text_of_a_long_prompt_says_what_it_leaves_out():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128, vocab_size=20, n_layer=1, n_head=1, n_embd=8))
    out = Console(file=io.StringIO(), width=80)
    print_text(explain(model, [1] * 100), ["a"] * 100, "aaa", out)
    lines = out.file.getvalue().splitlines()
    assert sum("the first 75 of 100 keys" in line for line in lines) == 2 and max(map(len, lines)) <= 80


class Page(HTMLParser):
    """Checks that every tag is closed where it must be, and collects text and tips."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tips, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        assert tag != "script" and not {"src", "href"} & dict(attrs).keys(), "the page must need nothing else"
        if tag in ("svg", "rect", "figure", "div", "table", "h1", "h2", "title", "b"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("svg", "rect", "figure", "div", "table", "h1", "h2", "title", "b"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        (self.tips if self.open[-2:] == ["rect", "title"] else self.text).append(data)


def test_html(explanation, tmp_path):
    path = tmp_path / "out.html"
    save_html(explanation, LABELS, "My <hobby>", path)
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    text = " ".join(page.text)
    assert "My <hobby>" in text and all(label in text for label in LABELS)
    assert all(stage.name in text for stage in explanation.stages())
    n, d = len(TOKENS), explanation.q.shape[-1]
    assert len(page.tips) == explanation.n_heads * (2 * n * n + n * d)
    assert f"·is → My: {explanation.weights[0, 0, 2, 0].item():.4g}" in page.tips
    assert f"↵, channel 3: {explanation.head_outputs[0, 0, 6, 3].item():.4g}" in page.tips
    assert "My → ·is: masked" in page.tips


def test_png(explanation, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "out.png"
    save_png(explanation, LABELS, "My hobby $is", path)
    pixels = image.imread(path)
    height, width, _ = pixels.shape
    assert height > 600 and width > 1000
    colours = {
        tuple((pixels[y, x, :3] * 255).round().astype(int)) for y in range(0, height, 3) for x in range(0, width, 3)
    }
    reds, greens, purples = ((103, 0, 31), (0, 68, 27), (45, 0, 75))  # the ends of the three colour maps
    assert (229, 231, 235) in colours and greens in colours  # masked cells, and a weight of 1
    ends = {reds, (5, 48, 97)}, {purples, (127, 59, 8)}  # a panel's largest value, positive or negative
    assert all(end & colours for end in ends)
