"""NVFP4 caches for the attention cases of `tests/cases.py`.

The bytes that no row may see are the worst there are: NaN block scales of both signs, and codes of
the largest magnitude.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_kernels import quantize_nvfp4, split_nvfp4
from tests.cases import CODE_STD, AttentionCase, make_inputs, spread

__all__ = ["NVFP4_CASES", "make_nvfp4_inputs"]
NAN_SCALES = (0x7F, 0xFF)


def make_nvfp4_inputs(case: AttentionCase, device: str = "cpu") -> dict[str, object]:
    """`make_inputs` for an nvfp4 cache; `kv_dtype` of the case does not matter.

    Pages hold `[K data | K scales | V data | V scales]` in the order of the case's layout. Of
    "interleaved", a row of each head has K and V side by side, data and scales in a tensor each.
    """
    inputs = make_inputs(replace(case, kv_dtype=torch.float32), device)
    sides = [_quantized(inputs[name]) for name in "kv"]
    if case.page_size is not None:
        sides = _in_pages(sides, case.layout)
    for name, (data, scale) in zip("kv", sides, strict=True):
        inputs[name], inputs[f"{name}_block_scale"] = data, scale
    return inputs


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales as bytes; of slots that hold NaN, what must never be read."""
    dead = x.isnan().any(-1)
    data, scale = quantize_nvfp4(x.nan_to_num(0.0) * CODE_STD, 1.0)
    scale = scale.view(torch.uint8)
    generator = torch.Generator(x.device).manual_seed(dead.numel())
    negative = torch.rand(scale.shape, generator=generator, device=x.device) < 0.5
    nan = torch.where(negative, *NAN_SCALES).to(torch.uint8)
    return data.masked_fill(dead[..., None], 0x7F), torch.where(dead[..., None], nan, scale)


def _in_pages(sides, layout: str):
    pages, tokens, heads, _ = sides[0][0].shape
    if layout == "interleaved":
        placed = []
        for part in range(2):
            rows = torch.cat([side[part] for side in sides], -1)
            placed.append(rows.chunk(2, -1))
        return [(placed[0][i], placed[1][i].view(torch.float8_e4m3fn)) for i in range(2)]
    row = sides[0][0].shape[-1] + sides[0][1].shape[-1]
    shape = (pages, 2, tokens, heads, row) if layout == "NHD" else (pages, 2, heads, tokens, row)
    cache = torch.zeros(shape, dtype=torch.uint8, device=sides[0][0].device)
    placed = []
    for index, side in enumerate(sides):
        own = cache[:, index] if layout == "NHD" else cache[:, index].transpose(1, 2)
        views = split_nvfp4(own)
        for view, part in zip(views, side, strict=True):
            view.view(torch.uint8).copy_(part)
        placed.append(views)
    return placed


def _case(name: str, *, batch: int = 3, kv: int = 700, q_len: int = 1, **fields) -> AttentionCase:
    fields.setdefault("kv_lens", spread(batch, max(1, kv // 3), kv, seed=len(name)))
    fields.setdefault("q_lens", (q_len,) * len(fields["kv_lens"]))
    fields.setdefault("seed", sum(map(ord, name)))
    return AttentionCase(id=name, **fields)


def nvfp4_grid() -> list[AttentionCase]:
    """What differs from FP8: head sizes and row buckets, pages and layouts, masks over scales."""
    cases = []
    for head_size in (64, 128, 256, 512):
        for group, q_len in ((1, 1), (8, 1), (8, 2), (3, 5), (16, 2), (8, 8)):
            name = f"d{head_size}-g{group}-q{q_len}"
            fields = {"head_size": head_size, "num_q_heads": 2 * group, "num_kv_heads": 2}
            cases.append(_case(name, q_len=q_len, **fields))
        for page_size, layout in ((16, "HND"), (32, "NHD"), (64, "HND"), (64, "interleaved"),
                                  (128, "NHD"), (192, "HND")):  # fmt: skip
            fields = {"head_size": head_size, "page_size": page_size, "layout": layout}
            cases.append(_case(f"d{head_size}-page{page_size}-{layout}", q_len=2, **fields))
        cases.append(_case(f"d{head_size}-fp16", head_size=head_size, q_dtype=torch.float16))
        cases.append(
            _case(f"d{head_size}-window", head_size=head_size, window=(100, 0), q_len=2, sinks=True)
        )
        cases.append(_case(f"d{head_size}-ragged", head_size=head_size, page_size=None, q_len=3))
        cases.append(_case(f"d{head_size}-one", head_size=head_size, batch=1, kv=5000))
    return [
        *cases,
        _case("odd-heads-d64", head_size=64, num_q_heads=9, num_kv_heads=3),
        _case(
            "64-rows-d256-page16",
            head_size=256,
            num_q_heads=16,
            q_len=8,
            kv=3000,
            page_size=16,
            window=(500, 0),
        ),
        _case("one-head-d128", head_size=128, num_q_heads=8, num_kv_heads=1),
        _case("window-both", window=(100, 3), causal=False, q_len=8),
        _case("softcap-sinks", softcap=20.0, sinks=True, q_magnitude=8.0, q_len=2),
        _case("scale-per-head", scale_kind="per_head"),
        _case("scale-none", scale_kind="none", k_scale=1.0),
        _case("sharp", q_magnitude=30.0, head_size=256),
        _case("varlen-with-zeros", kv_lens=(0, 500, 64, 0, 63, 129), q_lens=(1, 0, 3, 0, 8, 2)),
        _case("tile-edges", kv_lens=(1, 63, 64, 65, 127, 128, 129, 191, 192, 193), q_len=1),
        _case("tile-edges-d512", kv_lens=(1, 63, 64, 65, 127, 128, 129), head_size=512),
        _case("many-rows", kv_lens=(200, 333, 500), q_lens=(200, 1, 130)),
        _case("many-rows-d512", kv_lens=(200, 333), q_lens=(70, 130), head_size=512),
        _case("many-sequences", batch=90, kv=400, num_q_heads=16, num_kv_heads=4),
        _case("q-longer-than-kv", kv_lens=(3, 200, 1, 65), q_lens=(8, 8, 4, 2)),
    ]


NVFP4_CASES = nvfp4_grid()
