"""Builds host translation units of csrc/cuda together with the executor into a shared library.

An object is rebuilt when the text of a file that it was made from, the flags or the compiler changed.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXECUTOR = sorted((ROOT / "csrc/cuda/simt").glob("*.cpp"))
FLAGS = [
    "-std=c++20",
    "-O2",
    "-march=native",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",  # libraries of different tests do not share the executor's state
    "-Wall",
    "-Wno-unknown-pragmas",
    f"-ffile-prefix-map={ROOT}/=",
    f"-I{ROOT}/csrc",
    f"-I{ROOT}/csrc/cuda",
]


def compiler():
    """The host compiler, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def cache_folder():
    return Path(os.environ.get("ATTN_EXT_SIMT_CACHE", ROOT / "build" / "simt"))


def _digest(*texts):
    h = hashlib.sha256()
    for text in texts:
        h.update(text if isinstance(text, bytes) else str(text).encode())
        h.update(b"\0")
    return h.hexdigest()[:16]


def _machine():
    """What -march=native stands for here."""
    with contextlib.suppress(OSError):
        flags = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.M)
        if flags:
            return flags[0]
    return platform.machine()


def _hash_files(paths):
    return {str(p): _digest(Path(p).read_bytes()) if Path(p).exists() else "" for p in paths}


def _compile(source, folder, flags, key):
    """Returns the object and whether it is new."""
    source = Path(source).resolve()
    stem = f"{source.stem}-{_digest(source, key)}"
    obj, record, deps = (folder / (stem + suffix) for suffix in (".o", ".json", ".d"))
    if obj.exists() and record.exists():
        inputs = json.loads(record.read_text())
        if _hash_files(inputs) == inputs:
            return obj, False
    record.unlink(missing_ok=True)
    command = [compiler(), *flags, "-x", "c++", "-MMD", "-MF", str(deps), "-c", str(source), "-o", str(obj)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    used = deps.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    record.write_text(json.dumps(_hash_files(p for p in used if not p.startswith("/usr/"))))
    return obj, True


def build(name, sources, flags=(), jobs=2):
    """Compiles `sources` and the executor, returns the path of the library `name`."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *flags]
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    key = _digest(version, _machine(), *flags)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(lambda s: _compile(s, folder, flags, key), [*sources, *EXECUTOR]))
        objects = [str(obj) for obj, _ in results]
        # A loaded library is never overwritten: each set of inputs has its own file.
        library = folder / f"{name}-{_digest(*(Path(o).with_suffix('.json').read_text() for o in objects), key)}.so"
        if not library.exists():
            for old in folder.glob(f"{name}-*.so"):
                old.unlink()
            temporary = library.with_suffix(".tmp")
            subprocess.run(
                [compiler(), "-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-o", str(temporary), *objects, "-ldl"],
                check=True,
            )
            temporary.rename(library)
    return library


if __name__ == "__main__":
    import sys

    print(build(sys.argv[1], [Path(p) for p in sys.argv[2:]]))
