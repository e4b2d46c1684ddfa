"""Runs the Triton baseline in Triton's interpreter; prints {case id: what is wrong or null}.

A program of its own, because Triton decides at import whether it interprets or compiles:

    TRITON_INTERPRET=1 python -m tests.perf.interpret_triton_decode
"""

from __future__ import annotations

import json

import torch

from cute_kernels.attention.arguments import validate
from cute_kernels.reference.attention import attention_reference
from perf.baselines.triton_decode import DecodeBatch, DecodeConfig, decode_attention
from tests.cases import AttentionCase, make_inputs
from tests.compare import assert_lse_close, assert_output_close

MHA = {"num_q_heads": 2, "num_kv_heads": 2}
MQA = {"num_q_heads": 8, "num_kv_heads": 1}
GROUP_3 = {"num_q_heads": 6, "num_kv_heads": 2}
ONE_SPLIT = DecodeConfig(block_n=64, ctas_per_sm=0)
SPLITS = DecodeConfig(block_n=32, ctas_per_sm=8)
WIDE = DecodeConfig(block_n=128, ctas_per_sm=8)

# (case, configuration); split counts follow from 4 "SMs" in the interpreter.
CASES = (
    (AttentionCase("one-split", (200, 130), (1, 1), **MQA), ONE_SPLIT),
    (AttentionCase("one-split-sinks", (200, 0, 130), (1, 2, 0), sinks=True), ONE_SPLIT),
    (AttentionCase("splits", (700, 65), (1, 1), **MQA), SPLITS),
    (AttentionCase("default-config", (700,), (4,), **MQA), None),
    (AttentionCase("q8", (300, 64), (8, 5), **GROUP_3), SPLITS),
    (AttentionCase("q-longer-than-kv", (3, 200, 1), (8, 8, 4), **MQA), SPLITS),
    (AttentionCase("zeros", (0, 300, 64, 0), (1, 0, 3, 0), **GROUP_3), SPLITS),
    (AttentionCase("window", (400, 300), (3, 2), window=(100, 0), **MQA), SPLITS),
    (AttentionCase("window-0", (200,), (2,), window=(0, 0), **MQA), SPLITS),
    (AttentionCase("window-sinks", (400, 90), (2, 2), window=(63, 0), sinks=True), WIDE),
    (AttentionCase("non-causal", (130, 3, 300), (1, 8, 2), causal=False, **MHA), SPLITS),
    (AttentionCase("sinks", (400, 300), (2, 1), sinks=True, **GROUP_3), SPLITS),
    (AttentionCase("page16-HND", (130, 65, 300), (1, 2, 1), page_size=16, layout="HND"), WIDE),
    (AttentionCase("page32", (130, 300), (1, 1), page_size=32, layout="interleaved"), ONE_SPLIT),
    (AttentionCase("page192", (130, 500), (1, 1), page_size=192, scale_kind="batch"), SPLITS),
    (AttentionCase("wide-tiles", (500, 129), (1, 1), scale_kind="expanded"), WIDE),
    (AttentionCase("d64", (200,), (1,), head_size=64, scale_kind="none", **MQA), SPLITS),
    (AttentionCase("d64-64-rows", (200, 90), (8, 8), head_size=64, **MQA), SPLITS),
    (AttentionCase("d256", (300,), (1,), head_size=256, scale_kind="head", **MHA), SPLITS),
    (AttentionCase("d512", (130, 300), (1, 2), head_size=512, **MQA), SPLITS),
    (AttentionCase("huge-q", (200,), (1,), q_magnitude=3e4, **MQA), SPLITS),
    (AttentionCase("tiny-q", (200,), (1,), q_magnitude=1e-6, **MQA), SPLITS),
)
# The interpreter truncates float32 to bf16, so all but the range of q is checked in fp16.
BF16_CASES = {"huge-q": 8e-3, "tiny-q": 8e-3}
FP16_BOUND = 1e-3


def run(case: AttentionCase, config: DecodeConfig | None) -> str | None:
    """None if output and LSE are right, otherwise what is wrong."""
    dtype = torch.bfloat16 if case.id in BF16_CASES else torch.float16
    inputs = make_inputs(case)
    inputs["q"] = inputs["q"].to(dtype)
    out = torch.full(inputs["q"].shape, float("nan"), dtype=dtype)
    lse = torch.full((out.shape[1], out.shape[0]), float("nan"))
    batch = DecodeBatch(
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        block_table=inputs["block_table"],
        seqused_k=inputs["seqused_k"],
        cu_seqlens_q=inputs["cu_seqlens_q"],
        max_seqlen_q=inputs["max_seqlen_q"],
        softmax_scale=case.head_size**-0.5,
        causal=case.causal,
        window_left=case.window[0],
        k_descale=inputs["k_descale"],
        v_descale=inputs["v_descale"],
        s_aux=inputs["s_aux"],
    )
    decode_attention(batch, out, lse, config, interpret=True)
    reference, reference_lse = attention_reference(validate(**inputs), torch.float64)
    try:
        assert_output_close(out, reference, BF16_CASES.get(case.id, FP16_BOUND))
        assert_lse_close(lse, reference_lse)
    except AssertionError as error:
        return str(error)
    return None


if __name__ == "__main__":
    print(json.dumps({case.id: run(case, config) for case, config in CASES}))
