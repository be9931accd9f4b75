"""The emulator of tile instructions does what Intel's manual says, and refuses what a CPU refuses."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import emulator
import pytest
import torch
from tolerance import assert_same_bits

SOURCE = Path(__file__).parent / "tiles.cpp"


def build_tiles() -> Path:
    flags = ["-std=c++20", "-O3", "-DATTN_EXT_ISA=tiles", f"-I{emulator.ROOT / 'csrc'}", "-mavx512f", "-mavx512bw",
             "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c", "-mavx512bf16", "-mamx-tile", "-mamx-bf16",
             "-Wall", "-Wno-unused-function"]  # fmt: skip
    return emulator.build(SOURCE, [emulator.compiler("CXX", "g++"), *flags])


@pytest.fixture(scope="module")
def tiles():
    return ctypes.CDLL(build_tiles())


@pytest.fixture(autouse=True)
def emulation():
    with emulator.running():
        yield


def aligned(*shape, dtype):
    """Zeros that begin at a multiple of 64 bytes."""
    count = torch.Size(shape).numel()
    bytes_ = torch.zeros(count * dtype.itemsize + 64, dtype=torch.uint8)
    begin = -bytes_.data_ptr() % 64
    return bytes_[begin : begin + count * dtype.itemsize].view(dtype).view(shape)


def pairs_of(b):
    """(K, N) as the right factor's tile: (K / 2, N, 2)."""
    k, n = b.shape
    return b.view(k // 2, 2, n).transpose(1, 2).contiguous()


def flush(x):
    """Subnormal float32 become 0."""
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, torch.zeros_like(x) * x, x)


def product(c, a, b):
    """What TDPBF16PS computes, in float32 arithmetic: products of bfloat16 are exact, so an addition is an FMA."""
    a, b = flush(a.float()), flush(b.float())
    even, odd = torch.zeros_like(c), torch.zeros_like(c)
    for k in range(0, a.shape[1], 2):
        even = flush(even + a[:, k : k + 1] * b[k])
        odd = flush(odd + a[:, k + 1 : k + 2] * b[k + 1])
    return flush(flush(c) + flush(even + odd))


def multiply(tiles, c, a, b, times=1):
    m, n, k = *c.shape, a.shape[1]
    packed = pairs_of(b)
    tiles.multiply(
        m, n, k // 2, *(x for t in (a, packed, c) for x in (ctypes.c_void_p(t.data_ptr()),
        ctypes.c_int64(t.stride(0) * t.element_size()))), times,
    )  # fmt: skip


@pytest.mark.parametrize("m", [1, 2, 7, 16])
@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("k", [2, 6, 32])
def test_a_product_to_the_bit(tiles, m, n, k):
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.randn(m, n)
    expected = product(c, a, b)
    multiply(tiles, c, a, b)
    assert_same_bits(c, expected)


def test_products_accumulate(tiles):
    a, b, c = torch.randn(16, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randn(16, 16)
    expected = product(product(product(c, a, b), a, b), a, b)
    multiply(tiles, c, a, b, times=3)
    assert_same_bits(c, expected)


def test_subnormals_count_as_zero(tiles):
    tiny = torch.finfo(torch.float32).tiny
    a = torch.tensor([[tiny / 2, 0.0], [2.0, 0.0], [2.0**-64, 0.0], [1.0, 1.0]]).bfloat16()
    b = torch.tensor([[1.0, tiny / 2, 2.0**-64], [1.0, -tiny, 1.0]]).bfloat16()
    c = torch.full((4, 3), tiny / 4)
    multiply(tiles, c, a, b)
    assert c.tolist() == [[0.0, 0.0, 0.0], [2.0, 0.0, 2.0**-63], [2.0**-64, 0.0, 0.0], [2.0, -tiny, 1.0]]


def test_nan_and_inf(tiles):
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([[1.0, 0.0], [0.0, 0.0], [nan, 0.0]]).bfloat16()
    b = torch.tensor([[inf, 1.0], [0.0, 0.0]]).bfloat16()
    c = torch.zeros(3, 2)
    multiply(tiles, c, a, b)
    assert str(c.tolist()) == "[[inf, 1.0], [nan, 0.0], [nan, nan]]"


def test_strides(tiles):
    wide = torch.randn(16, 96).bfloat16()
    a, b, c = wide[:, 32:64], torch.randn(32, 16).bfloat16(), torch.randn(16, 48)
    expected, part = product(c[:, 16:32], a, b), c[:, 16:32]
    before = c.clone()
    multiply(tiles, part, a, b)
    assert_same_bits(part.contiguous(), expected)
    assert_same_bits(c[:, :16].contiguous(), before[:, :16].contiguous())
    assert_same_bits(c[:, 32:].contiguous(), before[:, 32:].contiguous())


def test_every_register(tiles):
    source, to = torch.randint(0, 256, (8, 1024), dtype=torch.uint8), torch.empty(8, 1024, dtype=torch.uint8)
    tiles.copy_all(ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(to.data_ptr()))
    source[3] = 0
    assert torch.equal(to, source)


@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("row_bytes", [4, 36, 64])
def test_memory_outside_the_shape_is_left_alone(tiles, rows, row_bytes):
    source, to = torch.arange(1024).byte().view(16, 64), torch.full((16, 64), 99, dtype=torch.uint8)
    tiles.load_only(rows, row_bytes, ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(to.data_ptr()))
    expected = torch.full((16, 64), 99, dtype=torch.uint8)
    expected[:rows, :row_bytes] = source[:rows, :row_bytes]
    assert torch.equal(to, expected)


def test_the_compiler_knows_what_the_instructions_read(tiles):
    assert tiles.reads_what_was_written(64) == 0


def test_registers_belong_to_a_thread(tiles):
    """Products on several threads at once."""
    wrong = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        a, b = torch.randn(16, 32, generator=g).bfloat16(), torch.randn(32, 16, generator=g).bfloat16()
        expected = product(torch.zeros(16, 16), a, b)
        for _ in range(50):
            c = torch.zeros(16, 16)
            multiply(tiles, c, a, b)
            if not torch.equal(c, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_counts(tiles):
    a, b, c = (aligned(*shape, dtype=torch.uint8) for shape in ((16, 64), (16, 64), (16, 64)))
    with emulator.counting() as counts:
        tiles.multiply(
            16, 16, 16, *(x for t in (a, b, c) for x in (ctypes.c_void_p(t.data_ptr()), ctypes.c_int64(64))), 5
        )
    assert 0 < counts.pop("traps") <= 11
    assert counts == {
        "ldtilecfg": 1, "tilerelease": 1, "tilezero": 0, "tileloadd": 3, "tilestored": 1, "tdpbf16ps": 5,
        "unaligned_rows": 0,
    }  # fmt: skip
    with emulator.counting() as counts:
        wide = torch.zeros(2048, dtype=torch.uint8)
        begin = -wide.data_ptr() % 64 + 2
        tiles.load_only(7, 64, ctypes.c_void_p(wide.data_ptr() + begin), ctypes.c_void_p(c.data_ptr()))
    assert counts["unaligned_rows"] == 7


SHAPES = """
shapes = (ctypes.c_uint8 * 64)()
def shape(t, rows, row_bytes):
    shapes[16 + 2 * t], shapes[17 + 2 * t], shapes[48 + t] = row_bytes % 256, row_bytes // 256, rows
shapes[0] = 1
for t in range(8):
    shape(t, 16, 64)
"""
REFUSED = {
    "no tile is configured": "tiles.use_without_config()",
    "TILEZERO: no tile is configured": "tiles.use_after_release()",
    "tile 0 has no shape": "tiles.use_of_a_tile_without_shape()",
    "palette 2": f"{SHAPES}shapes[0] = 2; tiles.config_of(shapes)",
    "reserved byte 9 is 1": f"{SHAPES}shapes[9] = 1; tiles.config_of(shapes)",
    "tile 2 has 17 rows": f"{SHAPES}shape(2, 17, 64); tiles.config_of(shapes)",
    "tile 3 has rows of 65 bytes": f"{SHAPES}shape(3, 16, 65); tiles.config_of(shapes)",
    "tile 4 has 0 rows of 64 bytes": f"{SHAPES}shape(4, 0, 64); tiles.config_of(shapes)",
    "tile 9 has a shape": f"{SHAPES}shape(9, 1, 4); tiles.config_of(shapes)",
    "(15, 16) += (16, 16 pairs) . (16 pairs, 16)": f"{SHAPES}shape(0, 15, 64); tiles.product_of(shapes)",
    "(16, 16) += (16, 15 pairs) . (16 pairs, 16)": f"{SHAPES}shape(1, 16, 60); tiles.product_of(shapes)",
    "(16, 16) += (16, 16 pairs) . (16 pairs, 8)": f"{SHAPES}shape(2, 16, 32); tiles.product_of(shapes)",
    "rows of 64, 62, 64 bytes": f"{SHAPES}shape(1, 16, 62); tiles.product_of(shapes)",
}


def run(code: str):
    """In a process of its own, with the emulator running."""
    setup = f"""
import ctypes
emulator, tiles = ctypes.CDLL({str(emulator.library_path())!r}), ctypes.CDLL({str(build_tiles())!r})
emulator.amx_emulator_start()
"""
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_cpu_refuses_ends_the_process(message):
    result = run(REFUSED[message])
    assert result.returncode == -6 and "AMX emulator: #" in result.stderr and message in result.stderr, result.stderr


def test_other_illegal_instructions_stay_illegal():
    assert run("tiles.not_a_tile_instruction()").returncode == -4


def test_without_the_emulator_tile_instructions_are_illegal():
    assert run("emulator.amx_emulator_stop(); tiles.use_without_config()").returncode == -4
