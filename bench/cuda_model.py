"""
Predicts the times of the CUDA kernels on an H200 from what the executor counts: `python -m bench.cuda_model`.

A big problem is not executed. Its launches are recorded (kernel, grid), the same kernel runs on small problems of the
same tiling, and each counter is extended by a polynomial in the problem's sizes that must reproduce every small run
exactly. A kernel then takes at least as long as its busiest resource; the table says which one that is. These are
bounds computed from counts, not measurements: latency and imperfect overlap come on top.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/simt"))

from attention_ops import AttentionOps  # noqa: E402
from executor import Library  # noqa: E402
from kernel_ops import KernelOps  # noqa: E402

# H200. Copy bandwidth and the matrix peak are measured ones; the rest is computed from the clock or assumed.
SMS = 132
CLOCK = 1.755e9  # Hz, assumed to be sustained
COPY_BYTES_PER_S = 4.3e12
MATRIX_FLOPS = 790e12  # of wgmma, which these kernels do not use: the roofline of the last column
MMA_FLOPS = 0.62 * MATRIX_FLOPS  # assumed share that mma.sync reaches on sm_90
L2_BYTES_PER_S = 5.5e12  # assumed
LAUNCH_S = 2.5e-6  # assumed, per kernel
MMA_FLOP = 2 * 16 * 8 * 16

Shape = dict[str, int]


@dataclass
class Case:
    """
    One row of the table.

    run(shape) calls the op; basis(shape) holds the terms of the polynomial; `samples` are shapes that fix its
    coefficients, at least one more than there are terms. flops and bytes: what the op must do at least.
    """

    name: str
    library: Library
    run: Callable[[Shape, int], None]
    shape: Shape
    samples: list[Shape]
    basis: Callable[[Shape], list[int]]
    flops: int
    bytes: int


def solve(rows: list[list[int]], values: list[int]) -> list[Fraction]:
    """Coefficients c with rows @ c = values, exactly; ArithmeticError where there are none."""
    n = len(rows[0])
    system = [[Fraction(x) for x in (*row, value)] for row, value in zip(rows, values, strict=True)]
    for column in range(n):
        pivot = next((i for i in range(column, len(system)) if system[i][column]), None)
        if pivot is None:
            raise ArithmeticError("the samples do not determine the polynomial")
        system[column], system[pivot] = system[pivot], system[column]
        system[column] = [x / system[column][column] for x in system[column]]
        for i, row in enumerate(system):
            if i != column and row[column]:
                system[i] = [x - row[column] * y for x, y in zip(row, system[column], strict=True)]
    if any(row[n] for row in system[n:]):
        raise ArithmeticError("a counter is not a polynomial of the given terms")
    return [row[n] for row in system[:n]]


def flatten(launch: dict) -> dict[str, int]:
    flat = {name: value for name, value in launch.items() if isinstance(value, int)}
    for buffer, traffic in launch["traffic"].items():
        flat |= {f"{buffer}.{name}": value for name, value in traffic.items()}
    return flat


def launches_of(case: Case, shape: Shape, sms: int, dry: bool = False) -> list[dict]:
    case.library.dry_run(dry)
    try:
        case.run(shape, sms)
        return case.library.launches()
    finally:
        case.library.dry_run(False)


def counters(case: Case) -> list[dict]:
    """The counters of each of the case's launches."""
    target = launches_of(case, case.shape, SMS, dry=True)
    registered = dict(case.library.registered)
    names = [launch["kernel"] for launch in target]
    for sms in (SMS, 1, 10**6):  # launchers choose by how well a problem fills the device
        if all([x["kernel"] for x in launches_of(case, s, sms, dry=True)] == names for s in case.samples):
            break
    else:
        raise ValueError(f"{case.name}: no small problem runs {names}")
    runs = [[flatten(x) for x in launches_of(case, s, sms)] for s in case.samples]
    rows, terms = [case.basis(s) for s in case.samples], case.basis(case.shape)
    for i, launch in enumerate(target):
        for name in sorted({name for run in runs for name in run[i]}):
            if name in ("threads", "shared_bytes", "blocks", "grid_x", "grid_y", "grid_z"):
                continue
            try:
                c = solve(rows, [run[i].get(name, 0) for run in runs])
            except ArithmeticError as e:
                raise ArithmeticError(f"{case.name}, {launch['kernel']}, {name}: {e}") from None
            launch[name] = round(sum(x * y for x, y in zip(c, terms, strict=True)))
        launch["registered"] = registered
    return target


def resources(launch: dict) -> dict[str, float]:
    """Seconds that each resource of an H200 needs for one launch."""
    blocks = launch["blocks"]
    share = -(-blocks // SMS) / blocks  # of the fullest multiprocessor
    wavefronts = sum(launch[f"{kind}_wavefronts"] for kind in ("shared_load", "shared_store", "ldmatrix"))
    sectors = memory = 0
    for name, size in launch["registered"].items():
        for kind in ("load_sectors", "store_sectors"):
            count = launch.get(f"{name}.{kind}", 0)
            sectors += count
            memory += min(32 * count, size)  # what is read again comes from the cache
    return {
        "mma": launch["mma"] * MMA_FLOP * share * SMS / MMA_FLOPS,
        "shared": wavefronts * share / CLOCK,
        "exp": launch["exp"] * share / 16 / CLOCK,
        "L2": 32 * sectors / L2_BYTES_PER_S,
        "memory": memory / COPY_BYTES_PER_S,
    }


# ---- the cases ----


def tensor(ops: AttentionOps | KernelOps, *shape: int) -> torch.Tensor:
    """
    Zeros, or no memory at all when nothing runs.

    With equal scores the softmax's maximum never grows, so that the count of exponentials does not depend on chance.
    """
    return (torch.zeros if ops.library.runs else torch.empty)(shape, dtype=torch.bfloat16)


def linear_cases() -> Iterator[Case]:
    ops = KernelOps()
    head_dim, group = 128, 4

    def linear(s: Shape, sms: int) -> None:
        ops.sms = sms
        ops.linear(tensor(ops, s["M"], s["K"]), tensor(ops, s["N"], s["K"]))

    def to_cache(s: Shape, sms: int) -> None:
        ops.sms = sms
        M, heads = s["M"], s["N"] // head_dim // (group + 2)
        rope = (*(torch.empty(M, head_dim // 2) for _ in range(2)), torch.arange(M))
        ops.qkv_projection_to_cache(
            tensor(ops, M, s["K"]),
            tensor(ops, s["N"], s["K"]),
            None,
            *(tensor(ops, -(-M // 16), 16, heads, head_dim) for _ in range(2)),
            torch.arange(M),
            n_heads=group * heads,
            n_kv_heads=heads,
            rope=rope,
        )

    N, K = 6144, 4096  # 32 heads and twice 8 of 128
    unit = (group + 2) * head_dim
    for name, run, rows in (
        ("linear", linear, (8192, 2048, 512, 128, 32, 1)),
        ("qkv_projection_to_cache", to_cache, (8192, 32)),
    ):
        for M in rows:
            m = min(M, 128)
            yield Case(
                name=f"{name} M={M} N={N} K={K}",
                library=ops.library,
                run=run,
                shape={"M": M, "N": N, "K": K},
                samples=[{"M": m, "N": n, "K": k} for n, k in ((unit, 512), (unit, 768), (2 * unit, 512))],
                basis=lambda s: [s["M"] * s["N"], s["M"] * s["N"] * s["K"]],
                flops=2 * M * N * K,
                bytes=2 * (M * K + N * K + M * N),
            )


def softmax_cases() -> Iterator[Case]:
    ops = KernelOps()

    def run(s: Shape, sms: int) -> None:
        ops.sms = sms
        ops.masked_softmax(tensor(ops, s["rows"], s["S"]), scale=0.125)

    for B, H, S in ((8, 16, 1024), (8, 16, 2048), (4, 16, 4096)):
        yield Case(
            name=f"masked_softmax B={B} H={H} S={S}",
            library=ops.library,
            run=run,
            shape={"rows": B * H * S, "S": S},
            samples=[{"rows": rows, "S": S} for rows in (4, 8)],
            basis=lambda s: [s["rows"]],
            flops=0,
            bytes=4 * B * H * S * S,
        )


def attention_cases() -> Iterator[Case]:
    ops = AttentionOps()

    def prefill(s: Shape, sms: int) -> None:
        ops.sms = sms
        q, k, v = (tensor(ops, 1, s["T"], s["heads"], s["D"]) for _ in range(3))
        ops.attention(q, k, v, causal=bool(s["causal"]))

    def decode(s: Shape, sms: int) -> None:
        ops.sms = sms
        B, S, D, page = s["B"], s["S"], s["D"], 16
        blocks = B * S // page
        key_cache, value_cache = (tensor(ops, blocks, page, s["Hkv"], D) for _ in range(2))
        table = torch.arange(blocks, dtype=torch.int32).view(B, -1)
        q = tensor(ops, B, 1, s["Hkv"] * s["group"], D)
        lengths = torch.full((B,), S, dtype=torch.int32)
        ops.paged_attention(q, key_cache, value_cache, table, lengths, max_seqlen_k=S)

    for D in (64, 128):
        for causal in (0, 1):
            B, H, T = 4, 16, 4096
            fixed = {"D": D, "causal": causal}
            yield Case(
                name=f"attention B={B} H={H} T={T} D={D}{' causal' * causal}",
                library=ops.library,
                run=prefill,
                shape={"heads": B * H, "T": T, **fixed},
                samples=[{"heads": 1, "T": t, **fixed} for t in (512, 1024, 1536)],
                basis=lambda s: [s["heads"] * x for x in (s["T"], s["T"] ** 2)],
                flops=4 * B * H * T * T * D // (1 + causal),
                bytes=2 * 4 * B * H * T * D,
            )
    for B, S in ((1, 8192), (8, 8192), (32, 8192), (64, 2048), (1, 131072)):
        Hkv, group, D = 8, 4, 128
        yield Case(
            name=f"paged decode B={B} S={S} H={Hkv * group} Hkv={Hkv} D={D}",
            library=ops.library,
            run=decode,
            shape={"B": B, "S": S, "Hkv": Hkv, "group": group, "D": D},
            samples=[{"B": 1, "S": s, "Hkv": 1, "group": group, "D": D} for s in (4096, 6144, 8192)],
            basis=lambda s: [s["B"] * s["Hkv"], s["B"] * s["Hkv"] * s["S"]],
            flops=4 * B * Hkv * group * S * D,
            bytes=4 * B * Hkv * S * D,
        )

    def merge(s: Shape, sms: int) -> None:
        shape = (1, s["tokens"], s["H"], 128)
        out_a, out_b = (tensor(ops, *shape) for _ in range(2))
        lse_a, lse_b = (torch.zeros(1, s["H"], s["tokens"]) for _ in range(2))
        ops.merge_attention(out_a, lse_a, out_b, lse_b)

    tokens, H = 16384, 16
    yield Case(
        name=f"merge_attention tokens={tokens} H={H} D=128",
        library=ops.library,
        run=merge,
        shape={"tokens": tokens, "H": H},
        samples=[{"tokens": t, "H": H} for t in (64, 128)],
        basis=lambda s: [s["tokens"] * s["H"]],
        flops=0,
        bytes=3 * 2 * tokens * H * 128,
    )


def cache_cases() -> Iterator[Case]:
    ops = KernelOps()
    Hkv, D, page = 8, 128, 16

    def caches(blocks: int) -> list[torch.Tensor]:
        return [tensor(ops, blocks, page, Hkv, D) for _ in range(2)]

    def append(s: Shape, sms: int) -> None:
        key, value = (tensor(ops, s["tokens"], Hkv, D) for _ in range(2))
        ops.append_kv(key, value, *caches(s["tokens"] // page), torch.arange(s["tokens"]))

    def copy(s: Shape, sms: int) -> None:
        pairs = s["pairs"]
        ops.copy_blocks(*caches(2 * pairs), torch.arange(2 * pairs).view(2, pairs).T)

    yield Case(
        name=f"append_kv tokens=8192 Hkv={Hkv} D={D}",
        library=ops.library,
        run=append,
        shape={"tokens": 8192},
        samples=[{"tokens": t} for t in (32, 64)],
        basis=lambda s: [s["tokens"]],
        flops=0,
        bytes=2 * 4 * 8192 * Hkv * D,
    )
    yield Case(
        name=f"copy_blocks (one cache) pairs=1024 Hkv={Hkv} D={D}",
        library=ops.library,
        run=copy,
        shape={"pairs": 1024},
        samples=[{"pairs": n} for n in (4, 8)],
        basis=lambda s: [s["pairs"]],
        flops=0,
        bytes=4 * 1024 * page * Hkv * D,
    )


def all_cases() -> Iterator[Case]:
    for group in (linear_cases, softmax_cases, attention_cases, cache_cases):
        yield from group()


RESOURCES = ("mma", "shared", "exp", "L2", "memory")


def predict(launches: list[dict]) -> tuple[float, dict[str, float]]:
    """Seconds in all, and what each resource needs over all launches."""
    total, columns = 0.0, dict.fromkeys(RESOURCES, 0.0)
    for launch in launches:
        needs = resources(launch)
        total += max(needs.values()) + LAUNCH_S
        columns = {name: seconds + needs[name] for name, seconds in columns.items()}
    return total, columns


def roofline(case: Case) -> float:
    """Seconds that no implementation can go below."""
    return max(case.flops / MATRIX_FLOPS, case.bytes / COPY_BYTES_PER_S)


def main() -> None:
    heads = " ".join(f"{name:>8}" for name in RESOURCES)
    print("Predicted on an H200, microseconds; a bound from counts, not a measurement.")
    print(f"{'op and shape (bfloat16)':50} {'predicted':>10} {'bound by':>9} {heads} {'roofline':>9}")
    for case in all_cases():
        total, columns = predict(counters(case))
        cells = " ".join(f"{1e6 * seconds:8.1f}" for seconds in columns.values())
        bound = max(columns, key=columns.get)
        print(f"{case.name:50} {1e6 * total:10.1f} {bound:>9} {cells} {1e6 * roofline(case):9.1f}", flush=True)


if __name__ == "__main__":
    main()
