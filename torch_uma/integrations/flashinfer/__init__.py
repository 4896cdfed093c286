"""FlashInfer: its wrappers and functions over the pages of an open step. Importing this does not import FlashInfer."""

from torch_uma.integrations.flashinfer.attention import Attention, leave_off, use
from torch_uma.integrations.flashinfer.calls import Call, plan_call, question_of, serving
from torch_uma.integrations.flashinfer.forms import FORMS, Question, Serving
from torch_uma.integrations.flashinfer.library import Library, why_off
from torch_uma.integrations.flashinfer.pages import Append, Pages, pages_of
from torch_uma.integrations.flashinfer.runner import Runner
from torch_uma.integrations.flashinfer.storage import Storage, storage_of
from torch_uma.integrations.flashinfer.warm_up import warm_up

__all__ = [
    "FORMS",
    "Append",
    "Attention",
    "Call",
    "Library",
    "Pages",
    "Question",
    "Runner",
    "Serving",
    "Storage",
    "leave_off",
    "pages_of",
    "plan_call",
    "question_of",
    "serving",
    "storage_of",
    "use",
    "warm_up",
    "why_off",
]
