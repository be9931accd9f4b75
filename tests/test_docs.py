"""What the documentation says is so: examples run, links and paths exist, every public name has an example."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import attn_ext

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MODULES = ["attn_ext"] + sorted(
    module.name
    for module in pkgutil.walk_packages(attn_ext.__path__, "attn_ext.")
    if not module.name.endswith(("._C", "__main__"))
    and not module.name.startswith("attn_ext.bench.peers.")  # run as scripts, by a Python with other packages
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples failed (see stdout)"


def public_names():
    """What `attn_ext` offers, and the functions that its public modules offer."""
    found = {}
    modules = [value for name in attn_ext.__all__ if inspect.ismodule(value := getattr(attn_ext, name))]
    modules += [importlib.import_module(f"attn_ext.{name}") for name in ("bench", "check")]
    for module in [attn_ext, *modules]:
        for name in module.__all__:
            value = getattr(module, name)
            is_class = inspect.isclass(value) and module is attn_ext and not issubclass(value, Exception)
            if inspect.isfunction(value) or is_class:
                found[f"{value.__module__}.{name}"] = value
    return found


def test_public_names_are_found():
    expected = {"attn_ext.ops.attention", "attn_ext.kv_cache.PagedKVCache", "attn_ext.explain.explain"}
    assert expected < public_names().keys()


@pytest.mark.parametrize("name", public_names())
def test_every_public_function_has_an_example(name):
    assert ">>> " in (inspect.getdoc(public_names()[name]) or "")


PYTHON_EXAMPLES = [
    pytest.param(match[1], id=f"{document.relative_to(ROOT)}-{i}")
    for document in DOCUMENTS
    for i, match in enumerate(re.finditer(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("code", PYTHON_EXAMPLES)
def test_python_examples(code):
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_there_is_a_python_example_in_the_readme():
    assert any(param.id.startswith("README.md") for param in PYTHON_EXAMPLES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    # A path in `code` that names a folder of this project must be there; <op> and * stand for any name.
    for path in re.findall(r"`((?:attn_ext|csrc|tests|docs|build_backend|\.ci)/[^`\s]*)`", text):
        pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
        if not list(ROOT.glob(pattern)):
            missing.append(path)
    # So must the folders and files of a map: lines of an indented block that begin with a path.
    for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S):
        missing += [
            path for path in re.findall(r"^ *([\w./-]+/|[\w-]+\.\w+)(?= )", block, re.M) if not (ROOT / path).exists()
        ]
    assert missing == []


def test_readme_commands():
    """The two commands, word for word: the first ones that begin with pip."""
    commands = re.findall(r"^ *(pip install .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert commands[:2] == [
        'pip install . && attn-ext generate "The capital of France is"',
        "pip install '.[test]' && pytest -n auto",
    ]


def test_changelog_has_this_version():
    assert re.search(rf"^## {re.escape(attn_ext.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
