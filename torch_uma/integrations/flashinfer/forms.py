"""The forms in which FlashInfer attends to pages, and which of them serve which layer.

Owns the rules: what each form takes, and what it would do silently to the rest. Every rule is a reason in words, so
that a refusal says why and what would help. Nothing here needs FlashInfer or a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from torch_uma.counts import whole
from torch_uma.errors import PlanError
from torch_uma.integrations.flashinfer.storage import Geometry
from torch_uma.layout import ALIGNMENT_BYTES, Chunk, Window

_HALVES = (torch.float16, torch.bfloat16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WRAPS = 2**32


@dataclass(frozen=True, kw_only=True)
class Question:
    """All that decides which form serves a layer in a step. PlanError for numbers that mean nothing.

    Attributes:
        geometry: how keys and values lie.
        num_heads: of the queries.
        dtype: of the queries.
        most_new_tokens: of one row.
        scale: what products of queries and keys are multiplied with, before `k_scale`.
        softcap: 0 for none.
        has_sinks: each head has the logit of one more key, without a value.
        k_scale, v_scale: what stored numbers are multiplied with, one number for a layer.
        capability: of the device, (9, 0) for an H100 or H200.
        has_finite_dead_rows: who writes the pages vouches that entries before a window that share a page with live
            ones hold finite numbers: so it is where every new token with an entry is written.
    """

    geometry: Geometry
    num_heads: int
    dtype: torch.dtype
    most_new_tokens: int = 1
    scale: float = 1.0
    softcap: float = 0.0
    has_sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    capability: tuple[int, int] = (9, 0)
    has_finite_dead_rows: bool = False

    def __post_init__(self) -> None:
        whole(self.num_heads, "num_heads of a question", least=1, error=PlanError)
        whole(self.most_new_tokens, "most_new_tokens of a question", least=1, error=PlanError)
        if not isinstance(self.dtype, torch.dtype):
            raise PlanError(f"the dtype of the queries is a torch.dtype, such as torch.bfloat16, not {self.dtype!r}")
        for name, least in (("scale", -math.inf), ("softcap", 0.0), ("k_scale", -math.inf), ("v_scale", -math.inf)):
            _check_number(getattr(self, name), name, least)
        is_pair = isinstance(self.capability, tuple) and len(self.capability) == 2
        if not is_pair or not all(isinstance(part, int) for part in self.capability):
            raise PlanError(f"a capability is a pair, (9, 0) for an H100 or H200, not {self.capability!r}")

    @property
    def group(self) -> int:
        """Query heads that read one head of keys."""
        return self.num_heads // self.geometry.num_kv_heads

    @cached_property
    def shared(self) -> Question:
        """The question without what a plan does not depend on, so that it is equal for all layers of one plan."""
        return replace(self, most_new_tokens=1, k_scale=1.0, v_scale=1.0)

    @property
    def window_left(self) -> int:
        """Positions that a query sees before its own, as FlashInfer counts; -1 for all."""
        lifetime = self.geometry.lifetime
        return lifetime.num_tokens - 1 if isinstance(lifetime, Window) else -1


def _check_number(value: Any, name: str, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise PlanError(f"{name} of a question is a number{'' if least else ' of at least 0'}, not {value!r}")


Rule = Callable[[Question], "str | None"]


def _layout(q: Question) -> str | None:
    """What holds for every form."""
    g = q.geometry
    heads = [dim * dtype.itemsize for dim, dtype in zip(g.dims, g.dtypes)]
    if q.num_heads % g.num_kv_heads:
        return f"{q.num_heads} query heads are no multiple of {g.num_kv_heads} heads of keys"
    if g.has_row_scales:
        return "it takes one scale for a layer, and cannot read a scale of each entry; store without scale rows"
    if g.dtypes[0] != g.dtypes[1]:
        return f"keys are {g.dtypes[0]} and values {g.dtypes[1]}, and it takes one dtype for both"
    if torch.uint8 in g.dtypes:
        return "it takes uint8 for NVFP4; declare the dtype that the numbers have"
    if g.dtypes[0] not in _HALVES + _FP8:
        return f"it reads float16, bfloat16, float8_e4m3fn and float8_e5m2, not {g.dtypes[0]}"
    if q.dtype not in _HALVES:
        return f"queries are float16 or bfloat16, and so is what they give, not {q.dtype}; cast them"
    if g.dtypes[0] in _HALVES and g.dtypes[0] != q.dtype:
        return f"queries of {q.dtype} over keys of {g.dtypes[0]}; cast the queries"
    if g.dtypes[0] in _HALVES and (q.k_scale, q.v_scale) != (1.0, 1.0):
        return f"scales are for keys and values of fp8, not of {g.dtypes[0]}"
    if any(size % ALIGNMENT_BYTES for size in (*heads, g.entry_bytes)):
        return (
            f"it loads {ALIGNMENT_BYTES} bytes at a time and does not look whether they are aligned; a head has "
            f"{heads} bytes here and an entry {g.entry_bytes}"
        )
    if isinstance(g.lifetime, Chunk) and g.lifetime.num_tokens % g.page_size:
        return (
            f"its tables begin at a page, and chunks of {g.lifetime.num_tokens} begin inside pages of {g.page_size}; "
            "use a page_size that divides the chunk"
        )
    if g.num_pages > 2**31 or g.page_stride >= _WRAPS:
        return f"it numbers {g.num_pages} pages with 32 bits, and counts {g.page_stride} elements from page to page so"
    return None


def _is_latent(q: Question) -> str | None:
    return None if q.geometry.is_latent else "it reads latents and their rotary keys, and here are keys and values"


def _has_heads(q: Question) -> str | None:
    return "it reads keys and values, and here are latents: use mla_fa2 or mla_fa3" if q.geometry.is_latent else None


def _one_token(q: Question) -> str | None:
    return None if q.most_new_tokens == 1 else f"it takes one query of each row, not {q.most_new_tokens}"


def _drafts(q: Question) -> str | None:
    if q.most_new_tokens == 1:
        return "it takes several queries of a row; for one there is xqa_decode"
    if q.geometry.dims[0] > 256:
        return f"several queries of a row are not for heads of {q.geometry.dims[0]} numbers, of at most 256"
    return None


def _no_sinks(q: Question) -> str | None:
    return "it takes sinks and never looks at them: use sink_fa2 or sink_fa3" if q.has_sinks else None


def _sinks(q: Question) -> str | None:
    return None if q.has_sinks else "it is for sinks; without them the forms of the same name do the same"


def _no_softcap(q: Question) -> str | None:
    return f"it has no soft cap, and {q.softcap} is asked for" if q.softcap else None


def _no_window(q: Question) -> str | None:
    return f"it has no window, and one of {q.window_left + 1} is asked for" if q.window_left >= 0 else None


def _equal_dims(q: Question) -> str | None:
    dims = q.geometry.dims
    return None if dims[0] == dims[1] else f"values have the strides of keys, and a head of these has {dims} numbers"


def _dims(*served: tuple[int, int]) -> Rule:
    def rule(q: Question) -> str | None:
        return None if q.geometry.dims in served else f"heads of {q.geometry.dims} numbers, where it has {list(served)}"

    return rule


def _group(q: Question) -> str | None:
    served = (1, 2, 3, 4, 6, 8)
    return None if q.group in served else f"{q.group} query heads read one head of keys, where it has {served}"


def _no_dead_rows(q: Question) -> str | None:
    if q.window_left < 0 or q.geometry.page_size == 1 or q.has_finite_dead_rows:
        return None
    return (
        "entries before the window that share a page with live ones are loaded and multiplied by 0, which is NaN if "
        "they are; vouch for them with has_finite_dead_rows=True, or use fa2 with tensor cores"
    )


def _fa2(q: Question) -> str | None:
    if q.geometry.dtypes[0] in _FP8 and 64 in q.geometry.dims:
        return "fp8 keys with heads of 64 numbers do not work; use bfloat16 or another form"
    return None


def _fa3(q: Question) -> str | None:
    if q.capability[0] != 9:
        return f"it is for compute capability 9, and this is {q.capability[0]}.{q.capability[1]}"
    if q.geometry.dtypes[0] in _FP8 and not q.geometry.is_latent:
        return f"fp8 keys need fp8 queries there, and here are {q.dtype}; use fa2"
    return None


def _mla(q: Question) -> str | None:
    dims, dtype = q.geometry.dims, q.geometry.dtypes[0]
    if dims not in ((512, 64), (512, 0)):
        return f"a latent of 512 numbers with a rotary key of 64 or none, not {dims}"
    if dtype == torch.float8_e5m2 or (dtype in _FP8 and (q.capability[0] != 9 or q.dtype != torch.bfloat16)):
        return f"latents of {dtype} need float8_e4m3fn, bfloat16 queries and compute capability 9"
    if (q.k_scale, q.v_scale) != (1.0, 1.0):
        return "latents are keys and values in one, and are taken as they are; multiply before you store them"
    return None


def _trtllm(q: Question) -> str | None:
    size = q.geometry.page_size
    if q.capability[0] != 10:
        return f"it is for compute capability 10, and this is {q.capability[0]}.{q.capability[1]}"
    if size & (size - 1):
        return f"pages of a power of two entries, not {size}"
    if q.geometry.page_stride >= 2**31:
        return f"it cuts strides to 31 bits, and pages lie {q.geometry.page_stride} elements apart"
    return None


def _trtllm_decode(q: Question) -> str | None:
    """Of keys of e4m3 it makes what queries of bfloat16 need."""
    dtype = q.geometry.dtypes[0]
    if dtype == torch.float8_e5m2 or (dtype in _FP8 and q.dtype != torch.bfloat16):
        return f"fp8 keys are float8_e4m3fn under queries of bfloat16 there, not {dtype} under {q.dtype}; use fa2"
    return None


def _trtllm_context(q: Question) -> str | None:
    if q.geometry.dtypes[0] in _FP8:
        return f"fp8 keys need fp8 queries there, and here are {q.dtype}; use fa2"
    return None


def _xqa(q: Question) -> str | None:
    g = q.geometry
    if q.capability[0] not in (9, 10, 12):
        return f"it is for compute capability 9, 10 and 12, and this is {q.capability[0]}.{q.capability[1]}"
    if g.page_size not in (16, 32, 64, 128):
        return f"pages of 16, 32, 64 or 128 entries, not {g.page_size}"
    if g.dtypes[0] == torch.float8_e5m2:
        return "of fp8 it reads float8_e4m3fn"
    if g.dims[0] % 16 or not 16 <= g.dims[0] <= 512:
        return f"heads of a multiple of 16 numbers up to 512, not {g.dims[0]}"
    if g.dims[0] > 256 and q.group > 16:
        return f"at most 16 query heads read one head of {g.dims[0]} numbers, not {q.group}"
    if g.entry_stride % g.dims[0]:
        return (
            f"it counts strides in heads and rounds down: {g.entry_stride} elements from entry to entry are no "
            f"multiple of {g.dims[0]}, so that it would read beside the keys; pad the rows of the sub-pool"
        )
    return None


def _persistent(q: Question) -> str | None:
    g = q.geometry
    if g.num_pages * g.page_stride > _WRAPS:
        return (
            f"it multiplies page and stride in 32 bits, which wrap in a grid of {g.num_pages} pages of "
            f"{g.page_stride} elements"
        )
    return "its plan waits for the whole device, and it has no buffers for a graph; use fa2 or fa3"


_SQUARE = ((64, 64), (128, 128), (256, 256))
_PREFILL = _dims(*_SQUARE, (192, 128))
_FA2: tuple[Rule, ...] = (_layout, _has_heads, _PREFILL, _fa2)
_FA3: tuple[Rule, ...] = (_layout, _has_heads, _PREFILL, _fa3, _no_dead_rows)
_MLA: tuple[Rule, ...] = (_layout, _is_latent, _mla, _no_sinks, _no_softcap, _no_window)
_FUNCTION: tuple[Rule, ...] = (_layout, _has_heads, _no_softcap, _equal_dims, _no_dead_rows)

FORMS: dict[str, tuple[Rule, ...]] = {
    "mla_fa3": (*_MLA, _fa3),
    "mla_fa2": _MLA,
    "sink_fa3": (*_FA3, _sinks, _no_softcap),
    "sink_fa2": (*_FA2, _sinks, _no_softcap),
    "decode_cuda_cores": (
        *(_layout, _has_heads, _one_token, _no_sinks, _equal_dims, _dims(*_SQUARE, (512, 512)), _group),
        _no_dead_rows,
    ),
    "decode_tensor_cores": (*_FA2, _one_token, _equal_dims, _no_sinks),
    "prefill_fa3": (*_FA3, _no_sinks),
    "prefill_fa2": (*_FA2, _no_sinks),
    "trtllm_decode": (*_FUNCTION, _dims(*_SQUARE), _trtllm, _trtllm_decode, _one_token),
    "trtllm_context": (*_FUNCTION, _dims(*_SQUARE), _trtllm, _trtllm_context),
    "xqa_decode": (*_FUNCTION, _xqa, _one_token),
    "xqa_drafts": (*_FUNCTION, _xqa, _drafts),
    "persistent": (_layout, _has_heads, _no_sinks, _no_window, _equal_dims, _persistent),
}
"""The rules of every form, the form that is taken first in front."""

FUNCTIONS = ("trtllm_decode", "trtllm_context", "xqa_decode", "xqa_drafts")
"""Forms without a plan, for graphs. Those of XQA give no log-sum-exp."""

_FEW_HEADS = 4  # of a group: with fewer, CUDA cores decode as fast as tensor cores


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Which forms serve a layer, and why not the others: by form a reason, None if it serves. As text, a table."""

    reasons: dict[str, str | None]

    @property
    def forms(self) -> tuple[str, ...]:
        """Those that serve, the one that is taken first in front."""
        return tuple(form for form, reason in self.reasons.items() if reason is None)

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        return "\n".join(f"{form:<{width}}  {reason or 'serves'}" for form, reason in self.reasons.items())


def why_not(form: str, question: Question) -> str | None:
    """Why `form` does not serve, None if it does. PlanError for a form that there is not."""
    if form not in FORMS:
        raise PlanError(f"there is no form {form!r} of FlashInfer here; there are {', '.join(FORMS)}")
    return next((reason for rule in FORMS[form] if (reason := rule(question))), None)


def serving(question: Question) -> Serving:
    """Which forms answer this question, and why the others do not."""
    forms = list(FORMS)
    if question.group >= _FEW_HEADS:
        forms.remove("decode_cuda_cores")
        forms.insert(forms.index("decode_tensor_cores") + 1, "decode_cuda_cores")
    return Serving(reasons={form: why_not(form, question) for form in forms})


def choose(question: Question, form: str | None = None) -> str:
    """The form that is taken first, or `form` if it serves. PlanError with the reasons if none does."""
    if form is not None:
        reason = why_not(form, question)
        if reason is not None:
            raise PlanError(f"FlashInfer's {form} does not serve this layer: {reason}")
        return form
    found = serving(question)
    planned = [form for form in found.forms if form not in FUNCTIONS]
    if not planned:
        raise PlanError(f"no form of FlashInfer with a plan serves this layer; use torch_uma.attend\n{found}")
    return planned[0]
