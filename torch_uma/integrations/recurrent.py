"""States of recurrent layers as the kernels of other libraries take them: a pool of slots, and a slot for each row.

Owns what each kernel takes of a pool that is strided, and how it treats padding. A slot is a physical page of the state
sub-pool, so its stride is that of the pages and the inner dimensions are dense. None of the libraries is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.view import View
from torch_uma.ledger import Lease
from torch_uma.plan import Plan
from torch_uma.pool import CachePool
from torch_uma.step import OpenStep, Step

_PADDING = "padding of recurrent kernels"

_FLOAT = (torch.float32,)
_BFLOAT = (torch.bfloat16,)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel takes of a pool of states.

    Attributes:
        shape: the inner dimensions in words; it is not checked, as a square state never fails but is read transposed.
        skips: indexes of padding that it neither reads nor writes: "negative", "zero" (and negative ones) or "none".
        writes_slot_zero: it sends padding to slot 0 and writes there.
        copies: why it would copy the whole pool, or none of it.
        dtypes: that it takes; None for any.
        dims: of the inner dimensions, the last ones; None for any.
        alignment_bytes: of the first slot and from one to the next.
        most_elements: offsets of so many elements wrap; None for 64 bits.
        index_dtype: of the slots.
    """

    shape: str
    skips: str = "none"
    writes_slot_zero: bool = False
    copies: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    dims: tuple[int, ...] | None = None
    alignment_bytes: int = 16
    most_elements: int | None = None
    index_dtype: torch.dtype = torch.int32


KERNELS: dict[str, Kernel] = {
    "flashinfer.gated_delta_rule_decode_pretranspose": Kernel(shape="[heads, V, K]", skips="negative", dtypes=_FLOAT),
    "flashinfer.gated_delta_rule_decode_pretranspose, bfloat16": Kernel(
        shape="[heads, V, K]", writes_slot_zero=True, dtypes=_BFLOAT, dims=(128, 128), alignment_bytes=32
    ),
    "flashinfer.gated_delta_rule_mtp": Kernel(shape="[heads, V, K]", skips="negative", dtypes=_FLOAT),
    "flashinfer.gated_delta_rule_decode": Kernel(
        shape="[heads, K, V]",
        copies="it makes the state contiguous and copies it back; use gated_delta_rule_decode_pretranspose",
    ),
    "flashinfer.chunk_gated_delta_rule": Kernel(
        shape="[heads, V, K]", dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    ),
    "flashinfer.selective_state_update": Kernel(shape="[heads, dim, state]", skips="negative"),
    "flashinfer.packed_kda_decode": Kernel(
        shape="[heads, 128, 128]", skips="negative", dtypes=_BFLOAT, dims=(128, 128)
    ),
    "flashinfer.fused_kda_decode": Kernel(shape="[heads, 128, 128]", skips="zero", dtypes=_BFLOAT, dims=(128, 128)),
    "fla.fused_recurrent_gated_delta_rule": Kernel(
        shape="[heads, K, V]",
        copies="its input_guard makes every input contiguous, and it takes no slots; use FlashInfer's or vLLM's",
    ),
    "fla.fused_recurrent_kda": Kernel(
        shape="[heads, K, V]",
        copies="its input_guard makes every input contiguous; call fused_recurrent_kda_fwd, which it wraps",
    ),
    "fla.fused_recurrent_kda_fwd": Kernel(shape="[heads, K, V]"),
    "vllm.fused_recurrent_gated_delta_rule": Kernel(shape="[heads, V, K]", skips="zero"),
    "vllm.selective_state_update": Kernel(shape="[heads, dim, state]", skips="zero"),
    "vllm.causal_conv1d_update": Kernel(shape="[dim, width]", skips="zero"),
    "causal_conv1d.causal_conv1d_update": Kernel(shape="[dim, width]", skips="negative", most_elements=2**32),
    "mamba_ssm.selective_state_update": Kernel(shape="[heads, dim, state]", most_elements=2**31),
}


@dataclass(frozen=True, kw_only=True)
class States:
    """What a kernel is given: the pool `[slots, *shape]`, a view of the arena, and the slots `[rows]` on its device."""

    pool: Tensor
    slots: Tensor


def view_of(plan: Plan, layer: int, name: str) -> View:
    """The state row `name` of a layer in every slot, `[slots, *shape]`. PlanError if it stores none."""
    for subpool, placed in plan.where(layer):
        if subpool.is_state and placed.row.name == name:
            shape, size_bytes = placed.row.shape, placed.row.dtype.itemsize
            return View(
                shape=(subpool.num_pages, *shape),
                strides=(subpool.page_bytes // size_bytes, *(prod(shape[axis + 1 :]) for axis in range(len(shape)))),
                offset_bytes=subpool.origin_bytes + placed.offset_bytes,
                dtype=placed.row.dtype,
            )
    names = [placed.row.name for subpool, placed in plan.where(layer) if subpool.is_state]
    raise PlanError(f"layer {layer} stores no state {name!r}; it stores {names}")


def why_not(kernel: str, view: View) -> str | None:
    """Why a kernel cannot work on these states in place; None if it can. PlanError for one that is not known."""
    takes = _known(kernel)
    stride_bytes = view.strides[0] * view.dtype.itemsize
    if takes.copies is not None:
        return takes.copies
    if takes.dtypes is not None and view.dtype not in takes.dtypes:
        return f"it takes states of {', '.join(map(str, takes.dtypes))}, not {view.dtype}"
    if takes.dims is not None and view.shape[-len(takes.dims) :] != takes.dims:
        return f"it takes states of {takes.dims}, not {view.shape[1:]}"
    if stride_bytes % takes.alignment_bytes or view.offset_bytes % takes.alignment_bytes:
        return (
            f"it loads {takes.alignment_bytes} bytes at a time, but slots begin at {view.offset_bytes} and lie "
            f"{stride_bytes} bytes apart; declare states of a multiple of {takes.alignment_bytes} bytes first"
        )
    return None


def num_slots(kernel: str, view: View) -> int:
    """So many slots, the lowest, can a kernel address: all of them, unless it counts elements with 32 bits.

    PlanError for a kernel that is not known.
    """
    most = _known(kernel).most_elements
    if most is None:
        return view.shape[0]
    return min(view.shape[0], max(0, (most - prod(view.shape[1:])) // view.strides[0] + 1))


def serving(plan: Plan, layer: int, name: str) -> dict[str, str]:
    """For each kernel, what is to be said of it for this state: why it does not serve, or how far it does."""
    view = view_of(plan, layer, name)
    said = {}
    for kernel in KERNELS:
        reason, most = why_not(kernel, view), num_slots(kernel, view)
        far = "serves" if most == view.shape[0] else f"serves the first {most} of {view.shape[0]} slots"
        said[kernel] = reason or far
    return said


def hold_slot_zero(pool: CachePool) -> Lease:
    """Keep slot 0 for padding, for kernels that skip it or write to it: it costs one state until the lease is closed.

    To be called before a sequence is added: PlanError if slot 0 is in use already, or there are no states. OutOfMemory
    if there is no room. The lease must be closed before the pool is.
    """
    if not pool.sequences.lifespans.states:
        raise PlanError("the plan has no states, so there is no slot to hold")
    sequence = pool.add()
    try:
        (page,) = sequence.pages[pool.sequences.lifespans.states[0]].tolist()
        slot = int(pool.allocator.v2p[page])
        if slot != 0:
            raise PlanError(f"slot 0 is in use already, {slot} is free; hold it before the first sequence is added")
        # A page that is freed under a lease belongs to nobody, and is neither moved nor handed out.
        return pool.lease(sequence, _PADDING)
    finally:
        sequence.free()


def states_of(step: Step, layer: int, name: str, kernel: str, *, num_rows: int | None = None) -> States:
    """The states of an open step's rows as a kernel takes them, padded to `num_rows` rows; notes that they are changed.

    Padding is -1 or 0, as the kernel skips it or keeps away from others. Rows that are fresh hold what was there
    before: `clear_fresh` first, once a step. PlanError where the kernel would copy the pool, take a row for padding,
    write padding over a state, or wrap; SequenceError for a step that has ended. Does not wait for the device.
    """
    _check_open(step)
    view = view_of(step.pool.plan, layer, name)
    reason = why_not(kernel, view)
    if reason is not None:
        raise PlanError(f"{kernel} cannot work on {name!r} of layer {layer} in place: {reason}")
    takes, slots = KERNELS[kernel], step.slots()
    if num_rows is not None:
        num_rows = whole(num_rows, "num_rows of states", least=1, error=PlanError)
    num_padded = 0 if num_rows is None else num_rows - len(slots)
    if num_padded < 0:
        raise PlanError(f"the step has {len(slots)} rows, more than {num_rows}")
    if int(slots.max()) >= num_slots(kernel, view):
        raise PlanError(
            f"{kernel} counts elements with 32 bits and reaches {num_slots(kernel, view)} slots, but a row has slot "
            f"{int(slots.max())}; use a kernel that counts with 64, or a smaller arena"
        )
    skips_zero = takes.skips == "zero"
    if (skips_zero or (takes.writes_slot_zero and num_padded)) and not _holds_slot_zero(step.pool):
        raise PlanError(
            f"{kernel} takes slot 0 for padding, but it can be the state of a sequence; call hold_slot_zero(pool) "
            "before the first is added"
        )
    is_zero_padding = skips_zero or takes.writes_slot_zero
    if num_padded and takes.skips == "none" and not takes.writes_slot_zero:
        raise PlanError(f"{kernel} has no padding; give it {len(slots)} rows")
    padding = np.full(num_padded, 0 if is_zero_padding else -1)
    step.state_touched = True
    return States(
        pool=view.over(step.pool.arena.bytes),
        slots=staged(np.append(slots, padding), step.pool.device).to(takes.index_dtype),
    )


def clear_fresh(step: Step) -> None:
    """Clear the states of rows that have none yet, of all layers. Writes the arena. Raises as `states_of` does."""
    _check_open(step)
    if not step.pool.sequences.lifespans.states:
        raise PlanError("the plan has no states, so there is none to clear")
    if not step.fresh.any():
        return
    pool = step.pool
    pages = pool.arena.pages(pool.plan.subpools[pool.sequences.lifespans.states[0]])
    pages.index_fill_(0, staged(step.slots()[step.fresh], pages.device), 0)


def _known(kernel: str) -> Kernel:
    if kernel not in KERNELS:
        raise PlanError(f"the kernel {kernel!r} is not known here; there are {', '.join(KERNELS)}")
    return KERNELS[kernel]


def _check_open(step: Step) -> None:
    if not isinstance(step, OpenStep):
        raise SequenceError(f"states are those of an open step of pool.begin() or pool.step(), not of {step!r}")
    if not step.is_open:
        raise SequenceError("the step has ended, and its slots may be those of others; begin another one")


def _holds_slot_zero(pool: CachePool) -> bool:
    allocator = pool.sequences.allocator
    place = allocator.id_base[pool.sequences.lifespans.states[0]]
    return any(lease.user == _PADDING and place in lease.places for lease in allocator.ledger.leases)
