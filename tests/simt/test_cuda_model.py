"""The model of bench/cuda_model.py: what it extrapolates is what the big problem needs, counted by hand."""

import sys

import pytest
from build import ROOT, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT))
    try:
        import bench.cuda_model
    finally:
        sys.path.remove(str(ROOT))
    return bench.cuda_model


def check(model, case):
    """The launches of a case, whose predicted time is at least the roofline."""
    launches = model.counters(case)
    total, columns = model.predict(launches)
    assert total >= max(columns.values()) / len(launches)
    assert total > model.roofline(case)
    return launches


def sectors(launch, buffer, kind="load"):
    return launch[f"{buffer}.{kind}_sectors"]


def test_linear(model):
    for case in model.linear_cases():
        M, N, K = (case.shape[x] for x in "MNK")
        (launch,) = check(model, case)
        rows = max(M, 16 if M <= 16 else 64)  # a tile's rows are multiplied whether or not they exist
        assert launch["mma"] == rows * N * K // 2048, case.name
        written = ["y"] if "linear" in case.name else ["q", "key_cache", "value_cache"]
        assert sum(sectors(launch, name, "store") for name in written) == M * N * 2 // 32
        if M <= 64:
            assert sectors(launch, "weight") == N * K * 2 // 32  # read once


def test_masked_softmax(model):
    for case in model.softmax_cases():
        rows, S = case.shape["rows"], case.shape["S"]
        (launch,) = check(model, case)
        assert sectors(launch, "scores") == sectors(launch, "out", "store") == rows * S * 2 // 32
        assert launch["exp"] == rows * S


def test_attention(model):
    for case in model.attention_cases():
        s = case.shape
        launches = check(model, case)
        if "tokens" in s:  # merge_attention
            (launch,) = launches
            size = s["tokens"] * s["H"] * 128 * 2 // 32
            assert sectors(launch, "out_a") == sectors(launch, "out_b") == sectors(launch, "out", "store") == size
        elif "T" in s:
            scores = s["heads"] * s["T"] ** 2 // (1 + s["causal"])
            (launch,) = launches
            assert scores <= launch["exp"] <= 1.05 * scores, case.name
            products = 2 * scores * s["D"] // 2048
            assert products <= launch["mma"] <= 1.05 * products
            if not s["causal"]:
                assert launch["mma"] == products
            size = s["heads"] * s["T"] * s["D"] * 2 // 32
            assert sectors(launch, "q") == sectors(launch, "out", "store") == size  # Q is read once
        else:
            size = s["B"] * s["S"] * s["Hkv"] * s["D"] * 2 // 32
            assert sectors(launches[0], "k") == sectors(launches[0], "v") == size  # once, whatever the group
        assert sum(launch["ldmatrix_wavefronts"] for launch in launches) == sum(
            launch["ldmatrix_ideal"] for launch in launches
        )


def test_cache(model):
    append, copy = model.cache_cases()
    (launch,) = check(model, append)
    size = append.shape["tokens"] * 8 * 128 * 2 // 32
    for name in ("key", "value"):
        assert sectors(launch, name) == sectors(launch, f"{name}_cache", "store") == size
    size = copy.shape["pairs"] * 16 * 8 * 128 * 2 // 32
    out, back = check(model, copy)
    assert sectors(out, "cache") == sectors(out, "workspace", "store") == size
    assert sectors(back, "workspace") == sectors(back, "cache", "store") == size


def test_counters_that_do_not_fit_are_an_error(model):
    assert model.solve([[1, 2], [1, 3], [1, 4]], [5, 7, 9]) == [1, 2]
    with pytest.raises(ArithmeticError, match="not a polynomial"):
        model.solve([[1, 2], [1, 3], [1, 4]], [5, 7, 10])
    with pytest.raises(ArithmeticError, match="do not determine"):
        model.solve([[1, 2], [2, 4], [3, 6]], [5, 10, 15])
