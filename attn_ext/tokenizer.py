"""Text to token ids and back, through the `tokenizers` library, with the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

__all__ = ["TextStream", "Tokenizer"]

# Tokens that end a turn or a text in the model families read here.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")

GPT2_SPLIT = None  # ByteLevel's own regular expression
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# tokenizer.ggml.pre -> (digits one by one, the regular expression that splits text before BPE)
GGUF_SPLITS = {
    "gpt-2": (False, GPT2_SPLIT),
    "smollm": (True, GPT2_SPLIT),
    "llama-bpe": (False, LLAMA3_SPLIT),
    "qwen2": (False, QWEN2_SPLIT),
}
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what generation needs beside it.

    `eos_ids` are the tokens that end a text. `bos_id` is put before every encoded text where the library's own
    post-processor does not. `chat_template` is a Jinja template, `special_tokens` the names it may use (`bos_token`).

    >>> import tokenizers
    >>> backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"my": 0, "hobby": 1, "?": 2}, unk_token="?"))
    >>> backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> tokenizer = Tokenizer(backend)
    >>> tokenizer.encode("my hobby"), tokenizer.decode([0, 1])
    ([0, 1], 'my hobby')
    """

    def __init__(self, backend, *, eos_ids: Iterable[int] = (), bos_id=None, chat_template=None, special_tokens=None):
        self.backend = backend
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it (such as <|im_end|>) become their ids.

        Raises ValueError for a lone surrogate, which is how Python keeps a byte that is not UTF-8.
        """
        bos = [] if self.bos_id is None else [self.bos_id]
        return bos + self._encode("encode", text)

    def _encode(self, what: str, text: str, **options) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise ValueError(f"{what}: the text must be UTF-8, got {text[e.start]!r} at position {e.start}") from e
        return self.backend.encode(text, **options).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder that takes one token at a time."""
        return TextStream(self)

    def chat(self, messages: str | list[dict]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer starts.

        `messages` is a list of {"role": ..., "content": ...}, or a string: one message of the user. Raises
        ValueError where the model has no chat template or its template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("chat: this model has no chat template")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = _render(self.chat_template, messages=messages, add_generation_prompt=True, **self.special_tokens)
        return self._encode("chat", text, add_special_tokens=False)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory, from its tokenizer.json; None where there is none."""
        import tokenizers

        directory = Path(directory)
        file = directory / "tokenizer.json"
        if not file.exists():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises plain Exception
            raise ValueError(f"tokenizer.json cannot be read: {str(e).splitlines()[0]}") from e
        settings = _json(directory / "tokenizer_config.json")
        special_tokens = {}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None:
                special_tokens[key] = token
        eos = [backend.token_to_id(special_tokens["eos_token"])] if "eos_token" in special_tokens else []
        for config in ("generation_config.json", "config.json"):
            ids = _json(directory / config).get("eos_token_id")
            eos += ids if isinstance(ids, list) else [ids]
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {t["name"]: t["template"] for t in template}.get("default")
        if (directory / "chat_template.jinja").exists():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(
            backend,
            eos_ids=[i for i in eos if i is not None] + _end_tokens(backend),
            chat_template=template,
            special_tokens=special_tokens,
        )

    @classmethod
    def from_gguf(cls, fields: dict) -> Tokenizer:
        """The byte-level BPE of a GGUF file, from its metadata; raises ValueError for another kind."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        def field(key: str, default=None):
            return fields.get(f"tokenizer.ggml.{key}", default)

        if field("model") != "gpt2":
            raise ValueError(f"tokenizer.ggml.model must be 'gpt2' (byte-level BPE), got {field('model')!r}")
        if field("pre") not in GGUF_SPLITS:
            raise ValueError(f"tokenizer.ggml.pre must be one of {sorted(GGUF_SPLITS)}, got {field('pre')!r}")
        digits, split = GGUF_SPLITS[field("pre")]
        tokens = field("tokens", [])
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: i for i, token in enumerate(tokens)},
                merges=[tuple(merge.split(" ", 1)) for merge in field("merges", [])],
                ignore_merges=field("pre") == "llama-bpe",
            )
        )
        steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
        if split is not None:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = decoders.ByteLevel()
        kinds = field("token_type", [])
        for kind, special in ((GGUF_CONTROL, True), (GGUF_USER_DEFINED, False)):
            backend.add_tokens(
                [
                    tokenizers.AddedToken(token, special=special, normalized=False)
                    for token, k in zip(tokens, kinds, strict=True)
                    if k == kind
                ]
            )
        names = {f"{name}_token": field(f"{name}_token_id") for name in ("bos", "eos")}
        eos = [i for i in (field("eos_token_id"), field("eot_token_id")) if i is not None]
        return cls(
            backend,
            eos_ids=eos + _end_tokens(backend),
            bos_id=field("bos_token_id") if field("add_bos_token", field("pre") == "llama-bpe") else None,
            chat_template=fields.get("tokenizer.chat_template"),
            special_tokens={name: tokens[i] for name, i in names.items() if i is not None},
        )


class TextStream:
    """Text of a growing token sequence: each call takes one token and gives the text that is now complete.

    A character whose bytes are spread over several tokens comes with the last of them.

    >>> import tokenizers
    >>> backend = tokenizers.Tokenizer(tokenizers.models.BPE({"Ã": 0, "©": 1}, []))   # the two bytes of one letter
    >>> backend.decoder = tokenizers.decoders.ByteLevel()
    >>> stream = Tokenizer(backend).stream()
    >>> stream(0), stream(1), stream.finish()
    ('', 'é', '')
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens already shown, that decide how the pending ones are written
        self._pending: list[int] = []

    def __call__(self, token: int) -> str:
        self._pending.append(token)
        text = self._text()
        # UTF-8 takes 4 bytes at most: what is still incomplete after 4 tokens never will be complete.
        if text.endswith("\ufffd") and len(self._pending) < 4:
            return ""
        return self._show(text)

    def finish(self) -> str:
        """What is left: an incomplete character at the end, as U+FFFD."""
        return self._show(self._text())

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _show(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text


def _end_tokens(backend) -> list[int]:
    return [i for i in map(backend.token_to_id, END_TOKENS) if i is not None]


def _json(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path.name} is not valid JSON: {e}") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} must hold a JSON object, got {type(content).__name__}")
    return content


def _render(template: str, **variables) -> str:
    """A chat template's text. Templates come with the model, so they run in Jinja's sandbox."""
    import datetime

    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except jinja2.TemplateError as e:
        raise ValueError(f"chat: the model's chat template failed: {e}") from e
