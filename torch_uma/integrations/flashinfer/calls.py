"""One call of FlashInfer as a value: which form, over which views, with which pages and numbers.

Owns what is decided before anything is run. `wrappers` applies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_uma.errors import PlanError
from torch_uma.integrations.flashinfer.forms import Question, Serving, choose
from torch_uma.integrations.flashinfer.forms import serving as serving_of
from torch_uma.integrations.flashinfer.pages import Pages, pages_of, pool_of
from torch_uma.integrations.flashinfer.storage import Storage, storage_of
from torch_uma.plan import Plan
from torch_uma.step import Step


@dataclass(frozen=True, kw_only=True)
class Call:
    """What FlashInfer is given for one layer in one step.

    Attributes:
        form: which of `FORMS`.
        question: what decided it. Layers whose questions share a plan, over the same pages, are planned once.
        storage: where keys and values of the layer lie.
        pages: what the rows read.
    """

    form: str
    question: Question
    storage: Storage
    pages: Pages

    @property
    def scale(self) -> float:
        """What products of queries and stored keys are multiplied with."""
        return self.question.scale * self.question.k_scale


def question_of(
    plan: Plan,
    layer: int,
    *,
    num_heads: int,
    dtype: torch.dtype,
    scale: float,
    most_new_tokens: int = 1,
    softcap: float = 0.0,
    has_sinks: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    capability: tuple[int, int] | None = None,
    has_finite_dead_rows: bool = False,
) -> Question:
    """The question that a layer asks; attributes as of `Question`. `capability` is that of the current device.

    PlanError for a layer that keeps no pair of keys and values, or where neither capability nor device is there.
    """
    if capability is None:
        if not torch.cuda.is_available():
            raise PlanError("there is no CUDA device, and its forms depend on it; give capability=(9, 0) of an H200")
        capability = torch.cuda.get_device_capability()
    return Question(
        geometry=storage_of(plan, layer).geometry,
        num_heads=num_heads,
        dtype=dtype,
        most_new_tokens=most_new_tokens,
        scale=scale,
        softcap=softcap,
        has_sinks=has_sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        capability=capability,
        has_finite_dead_rows=has_finite_dead_rows,
    )


def serving(plan: Plan, layer: int, *, num_heads: int, dtype: torch.dtype, **options: object) -> Serving:
    """Which forms of FlashInfer serve a layer of a plan, and why not the others; `options` as for `question_of`."""
    scale = options.pop("scale", 1.0)
    return serving_of(question_of(plan, layer, num_heads=num_heads, dtype=dtype, scale=scale, **options))  # type: ignore[arg-type]


def plan_call(
    step: Step, layer: int, question: Question, *, form: str | None = None, num_rows: int | None = None
) -> Call:
    """Decide what FlashInfer is given for a layer in an open step; `num_rows` pads the rows, as a graph needs it.

    `form` is taken if it serves; otherwise the first that does and has a plan. PlanError with the reason if none does.
    Does not look at the device.
    """
    plan = pool_of(step).plan
    storage = storage_of(plan, layer)
    pages = pages_of(step, plan.subpools[storage.geometry.subpool], num_rows=num_rows)
    return call_over(storage, question, pages, form=form)


def call_over(storage: Storage, question: Question, pages: Pages, *, form: str | None = None) -> Call:
    """The same over pages that are known already. PlanError if the question is of another layer or step."""
    if not isinstance(question, Question):
        raise PlanError(f"a call answers a question, which question_of makes, not {question!r}")
    if storage.geometry != question.geometry:
        raise PlanError("the question was asked of a layer of another geometry; ask question_of for this one")
    if pages.most_new_tokens > question.most_new_tokens:
        raise PlanError(
            f"a row has {pages.most_new_tokens} new tokens, but the question was asked for {question.most_new_tokens}"
        )
    return Call(form=choose(question, form), question=question, storage=storage, pages=pages)
