"""What the compiled module exports, needs and carries; and that no code for a newer CPU can leak out of its files.

A weak symbol (an inline function or a template instance that was not inlined) exists in every object that uses it, and
the linker keeps any one copy for all. If an object compiled with AVX flags defines one, the baseline code may end up
calling AVX instructions on a CPU without them. So these objects define no weak symbols.
"""

import os
import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attn_ext import _C

ROOT = Path(__file__).parents[1]
CMAKE = (ROOT / "CMakeLists.txt").read_text()


def cmake_list(name: str) -> list[str]:
    """The words of set(NAME ...), other lists that it names put in."""
    words = re.search(rf"^set\({name} (.*?)\)", CMAKE, re.MULTILINE)[1].replace('"', "").split()
    return [word for w in words for word in (cmake_list(w[2:-1]) if w.startswith("${") else [w])]


def lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def symbols(file: Path | str, *options: str) -> list[tuple[str, str]]:
    """(type, name) as nm prints them."""
    return [(line.split()[-2], line.split()[-1]) for line in lines("nm", *options, file) if line]


# --- the module as installed ------------------------------------------------------------------------------------------


def test_needs_only_libtorch_cpu_and_the_system():
    dynamic = lines("readelf", "-d", _C.__file__)
    needed = {re.search(r"\[(.*)\]", line)[1] for line in dynamic if "(NEEDED)" in line}
    system = r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[-\w]*)\.so\.\d+"
    assert "libtorch_cpu.so" in needed
    assert [name for name in sorted(needed) if name != "libtorch_cpu.so" and not re.fullmatch(system, name)] == []
    assert [line for line in dynamic if "RUNPATH" in line or "RPATH" in line] == []


def test_uses_only_the_stable_abi():
    undefined = [name for kind, name in symbols(_C.__file__, "-D", "--undefined-only") if kind == "U"]
    assert any(name.startswith(("aoti_torch_", "torch_")) for name in undefined)
    allowed = r"aoti_torch_\w+|torch_\w+|_?Py\w+|.+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+"
    assert [name for name in undefined if not re.fullmatch(allowed, name)] == []


def test_exports_only_its_init_function():
    # Weak: instances of the C++ library's templates, which every C++ module exports.
    exported = symbols(_C.__file__, "-D", "--defined-only")
    linker = {"__bss_start", "_edata", "_end", "_init", "_fini"}
    assert {name for kind, name in exported if kind not in "WVuw"} - linker == {"PyInit__C"}


def test_carries_no_folder_of_the_building_machine():
    found = re.findall(rb"[\w/.+-]+\.(?:cpp|cuh?|hpp|h)\b", Path(_C.__file__).read_bytes())
    assert [path for path in found if path.startswith(b"/")] == []


# --- objects with instruction-set flags -------------------------------------------------------------------------------

ISAS = re.search(r"list\(APPEND ISAS (.*?)\)", CMAKE)[1].split() if platform.machine() == "x86_64" else []


def compile_object(source: Path, isa: str, folder: Path) -> Path:
    """With the flags of CMake, but -O1: what -O3 inlines only by luck shows, and it takes half the time."""
    target = folder / f"{source.stem}.{isa}.o"
    flags = [*cmake_list("FLAGS_KERNELS"), *cmake_list(f"FLAGS_{isa}")]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", *flags]
    definitions = [f"-DATTN_EXT_ISA={isa}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, *definitions, "-O1", "-c", source, "-o", target], check=True)
    return target


def weak_symbols(file: Path) -> list[str]:
    # DW.ref.*: a pointer to the exception personality, data and the same in every object
    return [
        name for kind, name in symbols(file, "--defined-only") if kind in "WVuwv" and not name.startswith("DW.ref.")
    ]


@pytest.fixture(scope="module")
def isa_objects(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("objects")
    jobs = [(ROOT / f"csrc/cpu/{stem}.cpp", isa, folder) for stem in cmake_list("KERNELS") for isa in ISAS]
    if ISAS:
        jobs += [(ROOT / f"csrc/cpu/amx/{stem}.cpp", "amx", folder) for stem in cmake_list("KERNELS_amx")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda job: compile_object(*job), jobs))


def test_isa_objects_define_no_weak_symbols(isa_objects):
    assert {file.name: weak_symbols(file) for file in isa_objects} == {file.name: [] for file in isa_objects}


def test_isa_objects_export_their_namespace_only(isa_objects):
    """Each set's functions are told apart by the set's name, so no two copies can meet."""
    for file in isa_objects:
        isa = file.suffixes[0][1:]
        own = [name for kind, name in symbols(file, "--defined-only", "--extern-only") if kind in "TBDR"]
        assert own, file.name
        assert [name for name in own if not name.startswith(f"_ZN8attn_ext{len(isa)}{isa}")] == [], file.name


def test_isa_objects_call_c_functions_only(isa_objects):
    """Nothing of the C++ library or of torch: memcpy and the like. amx passes other types on to avx512."""
    for file in isa_objects:
        undefined = [name for _, name in symbols(file, "--undefined-only")]
        other = "_ZN8attn_ext6avx512" if ".amx." in file.name else "none"
        assert [name for name in undefined if name.startswith("_Z") and not name.startswith(other)] == [], file.name


TILE_INSTRUCTIONS = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps"}


def test_tile_instructions_are_in_the_amx_objects_only(isa_objects):
    """Those that tests/amx emulates, and not vdpbf16ps, which is slow on the CPUs that have tiles."""
    found = {file.name: set() for file in isa_objects}
    for file in isa_objects:
        text = "\n".join(lines("objdump", "-d", "--no-show-raw-insn", file))
        found[file.name] = set(re.findall(r"\t(\w*tile\w*|tdp\w+|vdpbf16ps)\b", text))
    assert set().union(*(found[f] for f in found if ".amx." in f)) == (TILE_INSTRUCTIONS if ISAS else set())
    assert {f for f, names in found.items() if names - {"vdpbf16ps"} and ".amx." not in f} == set()


@pytest.mark.skipif(not ISAS, reason="only x86-64 has files with instruction-set flags")
def test_a_leak_is_seen(tmp_path: Path):
    """The check above does find what it looks for: std::sort, not inlined, leaves weak symbols behind."""
    source = tmp_path / "leak.cpp"
    source.write_text("#include <algorithm>\nvoid sort(float* x, long n) { std::sort(x, x + n); }\n")
    leaks = weak_symbols(compile_object(source, "avx512", tmp_path))
    assert any("introsort_loop" in name for name in leaks), leaks
