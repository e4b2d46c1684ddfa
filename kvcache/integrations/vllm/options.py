"""What users say to this plugin: vLLM's `--additional-config`, section "cute_kernels".

    --additional-config '{"cute_kernels": {"kv_scales": "kv_scales.safetensors"}}'

A misspelt option must not be a missing one: a model would run, at scales of 1.0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from kvcache.checks import check_type
from kvcache.integrations.vllm import logger

SECTION = "cute_kernels"
KV_SCALES = "kv_scales"  # path of a file of scales, see `kvcache.calibration`
_ACCEPTED = (KV_SCALES,)
_NEAR = 0.8  # of difflib's ratio; "cute_kernel" has 0.95, "cuda_kernels" 0.73


def options(vllm_config: Any) -> Mapping[str, Any]:
    """The options given, all of them known.

    The section may be misspelt beyond recognition, as other plugins have theirs; a name that is
    almost ours is warned about.

    Raises:
        ValueError: an option that is not known; a section named like ours with other separators or
            capitals.
        TypeError: a section that is no mapping, an option of another type.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, Mapping):
        return {}
    for name in extra:
        if name != SECTION:
            _look_at(str(name))
    ours = check_type(_path(), extra.get(SECTION, {}), Mapping, f"a mapping with {KV_SCALES}")
    unknown = [name for name in ours if name not in _ACCEPTED]
    if unknown:
        raise ValueError(
            f"{_path()}: got {', '.join(map(repr, unknown))}; accepted: {', '.join(_ACCEPTED)}"
        )
    scales = ours.get(KV_SCALES)
    if scales is not None:
        check_type(_path(KV_SCALES), scales, (str, os.PathLike), "the path of a file")
    return ours


def _look_at(name: str) -> None:
    if _letters(name) == _letters(SECTION):
        raise ValueError(f"additional_config: got {name!r}; accepted: {SECTION}")
    if _letters(name) in map(_letters, _ACCEPTED):
        logger.warning(
            "cute_kernels: additional_config: %r is not read; it is, as %s", name, _path(KV_SCALES)
        )
    elif SequenceMatcher(None, _letters(name), _letters(SECTION)).ratio() > _NEAR:
        logger.warning(
            "cute_kernels: additional_config: %r is not read; our section is %r", name, SECTION
        )


def _path(*names: str) -> str:
    return "additional_config" + "".join(f"[{name!r}]" for name in (SECTION, *names))


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())
