"""Every test here needs the emulator: on a CPU with AMX the op suite runs the real instructions."""

import emulator
import pytest


def pytest_collection_modifyitems(items):
    if not emulator.possible():
        mark = pytest.mark.skip(reason="needs a CPU with AVX512-BF16 and without AMX, and a C compiler")
        for item in items:
            if item.path.parent.name == "amx":
                item.add_marker(mark)
