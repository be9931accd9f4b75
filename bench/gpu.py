"""The CUDA kernels on a GPU: `python bench/gpu.py check | small | capture | time` (gpu.sh runs them all).

check    every op against the reference in float64, and the bits that must not depend on the batch
small    the same on a few tiny problems, for compute-sanitizer
capture  a decode step captured in a CUDA graph, and replayed on other lengths and pages
time     beside torch's own kernels, with the shares of copy bandwidth and matrix peak measured in the same run

`--device cpu` runs check and small on the CPU kernels.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attn_ext
from attn_ext import reference

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tolerance import assert_as_accurate_as_torch, assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# ---- check -----------------------------------------------------------------------------------------------------------


def compare(name: str, op: Callable, reference_op: Callable, *args, terms: float = 0.0, **options) -> None:
    got = op(*args, **options)
    dtype = (got[0] if isinstance(got, tuple) else got).dtype
    with reference.precision(torch.float64):
        exact = reference_op(*args, **options)
    with reference.precision(dtype):
        plain = reference_op(*args, **options)
    if not isinstance(got, tuple):
        got, exact, plain = (got,), (exact,), (plain,)
    for g, e, p in zip(got, exact, plain, strict=True):
        assert_as_accurate_as_torch(g, e, p, terms=terms, what=name)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def check_linear(dtype, shapes) -> None:
    for M, N, K in shapes:
        x, weight = randn(M, K, dtype=dtype), randn(N, K, dtype=dtype) / K**0.5
        bias, residual = randn(N, dtype=dtype), randn(M, N, dtype=dtype)
        terms = (x.double().abs() @ weight.double().abs().T).max().item() + 8
        for activation in (None, "gelu", "gelu_tanh", "silu"):
            options = {"activation": activation, "residual": residual}
            compare(f"linear {M} {N} {K}", attn_ext.linear, reference.linear, x, weight, bias, terms=terms, **options)
        options = {"activation": "silu", "multiply": randn(M, N, dtype=dtype).clamp(-2, 2)}
        compare(f"linear {M} {N} {K}", attn_ext.linear, reference.linear, x, weight, bias, terms=2 * terms, **options)
        whole = attn_ext.linear(x, weight, bias)
        for rows in {1, min(M, 16), min(M, 64)}:
            assert_same_bits(attn_ext.linear(x[-rows:], weight, bias), whole[-rows:], f"linear, {rows} of {M} rows")


def check_projection(dtype, problems) -> None:
    for tokens, H, Hkv, D, block_size in problems:
        C, heads, blocks = 96, H + 2 * Hkv, tokens // block_size + 2
        x, weight = randn(tokens, C, dtype=dtype), randn(heads * D, C, dtype=dtype) / C**0.5
        caches = [randn(blocks, Hkv, block_size, D, dtype=dtype).transpose(1, 2) for _ in range(2)]
        slots = torch.randperm(blocks * block_size)[:tokens]
        slots[::5] = -1
        angles = torch.rand(64, D // 2) * 6
        rope = (angles.cos(), angles.sin(), torch.randint(64, (tokens,)))
        options = {"n_heads": H, "n_kv_heads": Hkv, "rope": rope}

        def run(op, wide=None, x=x, weight=weight, caches=caches, slots=slots, options=options):
            mine = [c.clone() if wide is None else c.to(wide) for c in caches]
            return (op(x, weight, None, *mine, slots, **options), *mine)

        got = run(attn_ext.qkv_projection_to_cache)
        with reference.precision(torch.float64):
            exact = run(reference.qkv_projection_to_cache, torch.float64)
        with reference.precision(dtype):
            plain = run(reference.qkv_projection_to_cache)
        for g, e, p in zip(got, exact, plain, strict=True):
            assert_as_accurate_as_torch(g, e, p, terms=12.0, what="qkv_projection_to_cache")


def check_norms(dtype, lengths) -> None:
    for C in lengths:
        x, weight, bias = 3 * randn(7, C, dtype=dtype) + 1, randn(C, dtype=dtype), randn(C, dtype=dtype)
        terms = 8 * weight.abs().max().item() + bias.abs().max().item()
        compare(f"rms_norm {C}", attn_ext.rms_norm, reference.rms_norm, x, weight, terms=terms)
        for b in (None, bias):
            compare(f"layer_norm {C}", attn_ext.layer_norm, reference.layer_norm, x, weight, b, terms=terms)
        whole, row = (attn_ext.layer_norm(t, weight, bias) for t in (x, x[3:4]))
        assert_same_bits(row, whole[3:4], "layer_norm, one row")


def check_softmax(dtype, lengths) -> None:
    for Tk in lengths:
        scores, mask = 4 * randn(2, 3, 7, Tk, dtype=dtype), torch.rand(2, 1, 7, Tk) > 0.3
        for options in ({}, {"causal": True}, {"mask": mask}, {"mask": torch.randn(7, Tk), "scale": 0.3}):
            compare(f"masked_softmax {Tk}", attn_ext.masked_softmax, reference.masked_softmax, scores, **options)
        row = attn_ext.masked_softmax(scores[1:, 1:2, 3:4], mask[1:, :, 3:4])
        assert_same_bits(row, attn_ext.masked_softmax(scores, mask)[1:, 1:2, 3:4], "masked_softmax, one row")


def check_attention(dtype, problems) -> None:
    for B, Tq, Tk, H, Hkv, D in problems:
        name = f"attention B{B} Tq{Tq} Tk{Tk} H{H}/{Hkv} D{D}"
        q, k, v = (randn(B, T, h, D, dtype=dtype) for T, h in ((Tq, H), (Tk, Hkv), (Tk, Hkv)))
        mask = torch.rand(B, 1, Tq, Tk) > 0.2
        every = {"window": (Tk // 2, 3), "softcap": 20.0, "alibi_slopes": torch.rand(H), "sinks": torch.randn(H)}
        choices = ({}, {"causal": True}, dict(causal=True, **every), {"mask": mask, "bias": torch.randn(H, Tq, Tk)})
        for options in choices:
            compare(name, attn_ext.attention, reference.attention, q, k, v, terms=8.0, return_lse=True, **options)

        # Paged is dense to the bit, one sequence is itself in any batch, a decode step is the last row of a prefill.
        whole = attn_ext.attention(q, k, v, causal=True)
        block_size = 16
        per_sequence = -(-Tk // block_size)
        table = torch.randperm(B * per_sequence + 3, dtype=torch.int32)[: B * per_sequence].view(B, per_sequence)
        caches = [torch.full((B * per_sequence + 3, block_size, Hkv, D), torch.nan, dtype=dtype) for _ in range(2)]
        position = torch.arange(Tk)
        slots = (table[:, position // block_size].long() * block_size + position % block_size).flatten()
        attn_ext.append_kv(k.flatten(0, 1), v.flatten(0, 1), *caches, slots)
        lens = torch.full((B,), Tk, dtype=torch.int32)
        assert_same_bits(attn_ext.paged_attention(q, *caches, table, lens), whole, f"{name}, paged")
        last = attn_ext.paged_attention(q[-1:, -1:], *caches, table[-1:], lens[-1:])
        assert_same_bits(last, whole[-1:, -1:], f"{name}, decode")
        rows = [t.flatten(0, 1) for t in (q, k, v)]
        cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * T for T in (Tq, Tk))
        varlen = attn_ext.attention_varlen(*rows, cu_q, cu_k, causal=True)
        assert_same_bits(varlen.view_as(whole), whole, f"{name}, varlen")

        a = attn_ext.attention(q, k[:, : Tk // 2], v[:, : Tk // 2], return_lse=True)
        b = attn_ext.attention(q, k[:, Tk // 2 :], v[:, Tk // 2 :], return_lse=True)
        compare("merge_attention", attn_ext.merge_attention, reference.merge_attention, *a, *b, terms=8.0)


def check_copies(dtype) -> None:
    caches = [randn(6, 5, 2, 24, dtype=dtype) for _ in range(2)]
    expected = [c.clone() for c in caches]
    pairs = torch.tensor([[0, 1], [1, 2], [3, 4], [4, 3], [0, 5]])
    for cache, old in zip(expected, caches, strict=True):
        cache[pairs[:, 1]] = old[pairs[:, 0]].clone()
    attn_ext.copy_blocks(*caches, pairs)
    for got, wanted in zip(caches, expected, strict=True):
        assert_same_bits(got, wanted, "copy_blocks")


def check_streams() -> None:
    """Ops run on the current stream of their tensors' device, whatever device is current."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        x, weight = torch.randn(4096, 1024, device=device), torch.randn(1024, 1024, device=device) / 32
        expected = x
        for _ in range(4):
            expected = attn_ext.linear(expected, weight)
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)
        y = x
        with torch.cuda.stream(stream):
            for _ in range(4):  # each waits for the one before only if they are on one stream
                y = attn_ext.linear(y, weight)
        with torch.cuda.device(0):
            torch.cuda.current_stream(device).wait_stream(stream)
            assert_same_bits(y, expected, "linear on another stream")
            assert torch.cuda.current_device() == 0


def check(device: str) -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        check_linear(dtype, [(1, 64, 128), (16, 96, 264), (65, 200, 77), (300, 384, 512), (2050, 1100, 320)])
        check_projection(dtype, [(9, 4, 2, 64, 16), (70, 3, 1, 6, 5), (200, 8, 2, 128, 16)])
        check_norms(dtype, [1, 33, 576, 1024, 1100, 5000, 80000])
        check_softmax(dtype, [1, 33, 512, 1000, 1025, 5000, 40000])
        check_attention(dtype, [
            (2, 70, 70, 4, 2, 64), (1, 1, 1500, 8, 2, 128), (3, 5, 77, 2, 2, 80), (1, 130, 700, 3, 1, 96),
            (1, 33, 150, 2, 1, 256), (2, 17, 40, 2, 1, 40), (1, 300, 1300, 2, 2, 128),
        ])  # fmt: skip
        check_copies(dtype)
        print(
            f"{dtype}: linear, projection, softmax, attention (dense, varlen, paged, merged), copies agree", flush=True
        )
    if device == "cuda":
        check_streams()
        print("streams and devices agree")


def small(device: str) -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        check_linear(dtype, [(5, 40, 72), (65, 70, 77), (130, 130, 40)])
        check_projection(dtype, [(9, 3, 1, 64, 4)])
        check_norms(dtype, [33, 1104])
        check_softmax(dtype, [33, 1100])
        check_attention(dtype, [(2, 20, 70, 2, 1, 64), (1, 1, 600, 2, 1, 128), (1, 5, 20, 2, 2, 40)])
        check_copies(dtype)


# ---- capture ---------------------------------------------------------------------------------------------------------


def capture(device: str) -> None:
    """One layer of a decode step: projection into the cache and paged attention, replayed as sequences grow."""
    dtype, B, H, Hkv, D, C, block_size, max_blocks = torch.bfloat16, 4, 8, 2, 64, 512, 16, 8
    torch.manual_seed(0)
    x, weight = randn(B, C, dtype=dtype), randn((H + 2 * Hkv) * D, C, dtype=dtype) / C**0.5
    caches = [randn(B * max_blocks, block_size, Hkv, D, dtype=dtype) for _ in range(2)]
    table = torch.randperm(B * max_blocks, dtype=torch.int32).view(B, max_blocks)
    lens = torch.ones(B, dtype=torch.int32)
    slots = torch.zeros(B, dtype=torch.int64)

    def step():
        q = attn_ext.qkv_projection_to_cache(x, weight, None, *caches, slots, n_heads=H, n_kv_heads=Hkv)
        return attn_ext.paged_attention(q.unsqueeze(1), *caches, table, lens)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    for new_lens in ([1, 16, 17, 128], [3, 100, 64, 127], [1, 1, 1, 1]):
        x.normal_()
        lens.copy_(torch.tensor(new_lens))
        last = lens.long() - 1
        slots.copy_(table[torch.arange(B), last // block_size].long() * block_size + last % block_size)
        graph.replay()
        replayed = out.clone()
        assert_same_bits(replayed, step(), f"replay with lengths {new_lens}")
    print("a captured decode step replays to the bit on other inputs, lengths and slots")


# ---- time ------------------------------------------------------------------------------------------------------------

L2_BYTES = 64 << 20


def seconds(call: Callable, make: Callable[[], tuple], budget: float = 0.25) -> float:
    """Median time of a call on inputs that are not in the L2 cache, without launch overhead: replayed as a graph."""
    first = make()
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    inputs = [first, *(make() for _ in range(min(3 * L2_BYTES // size, 40)))]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for args in inputs[:2]:
            call(*args)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for args in inputs:
            call(*args)
    times, spent = [], 0.0
    while len(times) < 3 or (spent < budget and len(times) < 100):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end) / 1e3
        times.append(begin.elapsed_time(end) / 1e3 / len(inputs))
    return statistics.median(times[1:])


def measure_limits() -> tuple[float, float]:
    """Bytes/s of a copy (read and written), and flop/s of torch's best bfloat16 product of random matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8)
    copy = 2 * source.numel() / seconds(lambda a, b: b.copy_(a), lambda: (source, torch.empty_like(source)))
    n = 8192
    a = randn(n, n, dtype=torch.bfloat16)
    return copy, 2 * n**3 / seconds(torch.matmul, lambda: (a, a))


class Table:
    def __init__(self) -> None:
        self.copy, self.peak = measure_limits()
        print(f"copy {self.copy / 1e12:.2f} TB/s, bfloat16 product {self.peak / 1e12:.0f} TFLOP/s")
        print(f"{'':44} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of copy':>8} {'of peak':>8} {'ratio':>6}")

    def row(
        self, name: str, make: Callable[[], tuple], candidates: dict[str, Callable], nbytes: int, flops: int
    ) -> None:
        """`ratio`: how many times as long as the first candidate, which is ours."""
        ours = None
        for label, call in candidates.items():
            try:
                t = seconds(call, make)
            except Exception as error:  # a torch kernel that does not take this problem
                print(f"{name + ', ' + label:44} {str(error).splitlines()[0][:60]}")
                if ours is None:
                    raise
                continue
            ours = ours or t
            print(
                f"{name + ', ' + label:44} {t * 1e6:9.1f} {nbytes / t / 1e9:7.0f} {flops / t / 1e12:8.1f} "
                f"{nbytes / t / self.copy:8.1%} {flops / t / self.peak:8.1%} {t / ours:6.2f}",
                flush=True,
            )


def with_backend(name: str, **options) -> Callable:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(q, k, v):
        with sdpa_kernel([getattr(SDPBackend, name)]):
            return sdpa(*(t.transpose(1, 2) for t in (q, k, v)), **options)

    return call


def time(device: str) -> None:
    torch.manual_seed(0)
    bf16, table = torch.bfloat16, Table()

    K, N = 4096, 6144
    for M in (8192, 2048, 512, 128, 32, 1):
        table.row(
            f"linear M{M} N{N} K{K}", lambda M=M: (randn(M, K, dtype=bf16), randn(N, K, dtype=bf16)),
            {"ours": attn_ext.linear, "torch": torch_linear}, 2 * (M * K + N * K + M * N), 2 * M * N * K,
        )  # fmt: skip
    for C in (1024, 4096, 8192):
        rows = 2**26 // C
        table.row(
            f"rms_norm {rows} x {C}", lambda rows=rows, C=C: (randn(rows, C, dtype=bf16), randn(C, dtype=bf16)),
            {"ours": attn_ext.rms_norm, "torch": lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-5)},
            4 * rows * C, 0,
        )  # fmt: skip
    for T in (1024, 2048, 4096):
        shape = (4, 16, T, T)
        table.row(
            f"softmax {shape}", lambda shape=shape: (randn(*shape, dtype=bf16),),
            {"ours": attn_ext.masked_softmax, "torch": lambda s: s.softmax(-1)}, 4 * math.prod(shape), 0,
        )  # fmt: skip
    B, T, H = 4, 4096, 16
    for D in (64, 128):
        for causal in (False, True):
            table.row(
                f"attention B{B} T{T} H{H} D{D}{' causal' if causal else ''}",
                lambda D=D: tuple(randn(B, T, H, D, dtype=bf16) for _ in range(3)),
                {
                    "ours": lambda q, k, v, causal=causal: attn_ext.attention(q, k, v, causal=causal),
                    "flash": with_backend("FLASH_ATTENTION", is_causal=causal),
                    "cudnn": with_backend("CUDNN_ATTENTION", is_causal=causal),
                },
                8 * B * T * H * D, 4 * B * H * T * T * D // (2 if causal else 1),
            )  # fmt: skip
    H, Hkv, D, block_size = 32, 8, 128, 16
    for B, T in ((1, 8192), (8, 8192), (32, 8192), (64, 2048)):
        blocks = T // block_size
        block_table = torch.randperm(B * blocks, dtype=torch.int32).view(B, blocks)
        lens = torch.full((B,), T, dtype=torch.int32)

        def paged(q, k, v, block_table=block_table, lens=lens):
            caches = (t.view(-1, block_size, Hkv, D) for t in (k, v))
            return attn_ext.paged_attention(q, *caches, block_table, lens)

        table.row(
            f"paged decode B{B} T{T} H{H}/{Hkv} D{D}",
            lambda B=B, T=T: (randn(B, 1, H, D, dtype=bf16), *(randn(B, T, Hkv, D, dtype=bf16) for _ in range(2))),
            {"ours": paged, "torch (dense)": with_backend("FLASH_ATTENTION", enable_gqa=True)},
            4 * B * T * Hkv * D, 4 * B * H * T * D,
        )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "small", "capture", "time"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    torch.set_default_device(arguments.device)
    with torch.no_grad():
        {"check": check, "small": small, "capture": capture, "time": time}[arguments.what](arguments.device)
