"""The attention ops of the package, run by the CUDA kernels under the executor."""

from ctypes import byref, c_int64

import torch
from build import ROOT, build
from executor import Library
from params import make

SOURCES = ["attention.cu", "attention_bf16.cu", "attention_f16.cu", "attention_f32.cu", "merge_attention.cu"]


def _broadcast_strides(x):
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _longest(cu_seqlens):
    return max((cu_seqlens[1:] - cu_seqlens[:-1]).tolist(), default=0)


class AttentionOps:
    """attention, attention_varlen, paged_attention and merge_attention with the signatures of the package.

    `seed` chooses the schedule, and `sms` the device's number of multiprocessors, on which it depends whether blocks
    share the keys of a row: with 1 they do where there are very few rows, with 10000 wherever there are several splits.
    `launches` holds the counters of the last call.
    """

    def __init__(self):
        entry = ROOT / "tests/simt/entries/attention.cpp"
        self.library = Library(build("attention", [*(ROOT / "csrc/cuda" / name for name in SOURCES), entry]))
        self.library.lib.attention_workspace.restype = c_int64
        self.seed = 0
        self.sms = 132
        self.launches = []

    # ---- the three presentations

    def attention(self, q, k, v, *, causal=False, return_lse=False, **options):
        b, tq, h, d = q.shape
        out, lse = q.new_empty(q.shape), torch.empty(b, h, tq)
        self._run(
            q, k, v, out, lse, causal=causal, **options,
            fields={
                "B": b, "Tq": tq, "Tk": k.shape[1], "q_batch_stride": q.stride(0), "k_batch_stride": k.stride(0),
                "v_batch_stride": v.stride(0), "out_batch_stride": tq * h * d, "lse_batch_stride": h * tq,
                "lse_head_stride": tq,
            },
        )  # fmt: skip
        return (out, lse) if return_lse else out

    def attention_varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, causal=False,
        return_lse=False, **options,
    ):  # fmt: skip
        out, lse = q.new_empty(q.shape), torch.empty(q.shape[1], q.shape[0])
        self._run(
            q, k, v, out, lse, causal=causal, **options,
            indices={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k},
            fields={
                "B": len(cu_seqlens_q) - 1, "Tq": max_seqlen_q or _longest(cu_seqlens_q), "total_q": q.shape[0],
                "Tk": max_seqlen_k or _longest(cu_seqlens_k), "total_k": k.shape[0], "lse_head_stride": q.shape[0],
            },
        )  # fmt: skip
        return (out, lse) if return_lse else out

    def paged_attention(
        self, q, key_cache, value_cache, block_table, seq_lens, *, cu_seqlens_q=None, max_seqlen_q=None,
        max_seqlen_k=None, causal=True, return_lse=False, **options,
    ):  # fmt: skip
        out = q.new_empty(q.shape)
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        indices = {"block_table": block_table, "seq_lens": seq_lens}
        fields = {
            "B": len(seq_lens), "Tk": max_seqlen_k or max(seq_lens.tolist(), default=0),
            "num_blocks": key_cache.shape[0], "block_size": key_cache.shape[1],
            "block_table_stride": block_table.stride(0),
            "k_batch_stride": key_cache.stride(0), "v_batch_stride": value_cache.stride(0),
        }  # fmt: skip
        if cu_seqlens_q is None:
            b, tq, h, d = q.shape
            lse = torch.empty(b, h, tq)
            fields |= {"Tq": tq, "q_batch_stride": q.stride(0), "out_batch_stride": tq * h * d}
            fields |= {"lse_batch_stride": h * tq, "lse_head_stride": tq}
        else:
            lse = torch.empty(q.shape[1], q.shape[0])
            indices |= {"cu_seqlens_q": cu_seqlens_q}
            fields |= {
                "Tq": max_seqlen_q or _longest(cu_seqlens_q),
                "total_q": q.shape[0],
                "lse_head_stride": q.shape[0],
            }
        self._run(q, key_cache, value_cache, out, lse, causal=causal, **options, indices=indices, fields=fields)
        return (out, lse) if return_lse else out

    def merge_attention(self, out_a, lse_a, out_b, lse_b):
        out, lse = out_a.new_empty(out_a.shape), torch.empty(lse_a.shape)
        ragged = out_a.dim() == 3  # then the batch is 1, and its stride does not matter

        def strides(x):
            return [0, *x.stride()[:2]] if ragged else x.stride()[:3]

        def lse_strides(x):
            return [0, *x.stride()] if ragged else x.stride()

        inputs = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        params = make(
            "MergeAttentionParams", dtype=out_a.dtype, B=1 if ragged else out_a.shape[0], T=out_a.shape[-3],
            H=out_a.shape[-2], D=out_a.shape[-1], a_strides=strides(out_a), b_strides=strides(out_b),
            lse_a_strides=lse_strides(lse_a), lse_b_strides=lse_strides(lse_b), out=out, lse=lse, **inputs,
        )  # fmt: skip
        self._register(inputs, {"out": out, "lse": lse})
        self._call("merge_attention", byref(params))
        return out, lse

    # ---- what they share

    def _run(
        self, q, k, v, out, lse, *, fields, indices=None, causal, scale=None, window=None, softcap=0.0,
        alibi_slopes=None, sinks=None, mask=None, bias=None,
    ):  # fmt: skip
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "mask": mask,
            "bias": bias,
            **(indices or {}),
        }
        tensors = {name: x for name, x in tensors.items() if x is not None}
        left, right = (-1, -1) if window is None else window
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            fields["alibi_batch_stride"] = alibi_slopes.stride(0)
        if mask is not None:
            fields["mask_strides"] = _broadcast_strides(mask)
        if bias is not None:
            fields |= {"bias_strides": _broadcast_strides(bias), "bias_dtype": bias.dtype}
        params = make(
            "AttentionParams", dtype=q.dtype, H=q.shape[-2], Hkv=k.shape[-2], D=q.shape[-1], out=out, lse=lse,
            q_row_stride=q.stride(-3), q_head_stride=q.stride(-2), k_row_stride=k.stride(-3),
            k_head_stride=k.stride(-2), v_row_stride=v.stride(-3), v_head_stride=v.stride(-2),
            out_row_stride=q.shape[-2] * q.shape[-1], out_head_stride=q.shape[-1], causal=causal, softcap=softcap,
            scale=q.shape[-1] ** -0.5 if scale is None else scale, window_left=left, window_right=right,
            **tensors, **fields,
        )  # fmt: skip
        if "block_table" in tensors and params.block_table is None:
            params.block_table = torch.zeros(1, dtype=torch.int32).data_ptr()  # null means dense keys
        self._register(tensors, {"out": out, "lse": lse})
        workspace = torch.empty(self.library.lib.attention_workspace(byref(params)), dtype=torch.uint8)
        self.library.register("workspace", workspace, "scratch")
        self._call("attention", byref(params), workspace)

    def _register(self, inputs, outputs):
        """Tells the executor of the tensors; those that share storage are one buffer."""
        self.library.reset()
        self.library.seed(self.seed)
        self.library.device(sms=self.sms)
        by_storage = {}
        for name, x in inputs.items():
            if x.numel():
                by_storage.setdefault(x.untyped_storage().data_ptr(), []).append((name, x))
        for tensors in by_storage.values():
            name, x = "+".join(name for name, _ in tensors), tensors[0][1]
            if len(tensors) > 1:
                x = x.new_empty(0).set_(x.untyped_storage())
            self.library.register(name, x, "input")
        for name, x in outputs.items():
            self.library.register(name, x, "output")

    def _call(self, entry, *args):
        self.library.call(entry, *args)
        self.library.check_outputs()
        self.launches = self.library.launches()
