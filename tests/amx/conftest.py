"""On a CPU with AMX the tests of the ops run the real instructions; those of the emulator itself need it."""

import emulator
import pytest

import attn_ext

POSSIBLE = emulator.possible()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name != "amx" or POSSIBLE:
            continue
        if item.path.name == "test_emulator.py" or "amx" not in attn_ext.backends():
            item.add_marker(pytest.mark.skip(reason="needs AVX512-BF16 without AMX, and a C compiler"))
