"""Figures: bandwidth as a share of a copy in the same run, launches, and what a step costs beside fixed pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torch_uma
from gpu.decode import Decode, layers_of
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool

BANDWIDTH, LAUNCHES, STEPS = "Bandwidth", "Launches", "Steps"

NUM_HOST_ROUNDS = 50  # as many in a dry run, which so sees whether sequences stay within `max_tokens`


def take_figures(report: Report, device: Device) -> None:
    """All of them."""
    report.run(BANDWIDTH, "all measured", partial(_bandwidth, report, device))
    report.run(LAUNCHES, "all counted", partial(_launches, report, device))
    report.run(STEPS, "all measured", partial(_steps, report, device))


def _bandwidth(report: Report, device: Device) -> None:
    num_bytes = device.size(2 << 30, 1 << 22)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch).fill_(1)
    target = torch.empty_like(source)
    copy_rate = 2 * num_bytes / device.seconds(partial(target.copy_, source))
    report.figure(BANDWIDTH, "copy on the device", copy_rate / 1e9, "GB/s", f"{num_bytes:,} bytes, read and written")
    del target
    for page_bytes in (16 << 10, 64 << 10, device.size(1 << 20, 1 << 17)):
        num_pages = num_bytes // page_bytes
        order = torch.randperm(num_pages, device=device.torch)
        half = num_pages // 2
        seconds = device.seconds(
            partial(torch.ops.torch_uma.relocate, source, order[:half], order[half : 2 * half], 0, page_bytes)
        )
        _share(report, f"relocate, pages of {page_bytes >> 10} KiB", 2 * half * page_bytes / seconds, copy_rate)
    num_layers, width = 4, 8 * 128
    row_bytes = width * 2
    entry_bytes = num_layers * 2 * row_bytes
    entries = torch.randperm(num_bytes // entry_bytes, device=device.torch)
    rows = [torch.randn(len(entries), width, device=device.torch).bfloat16() for _ in range(2)]
    where: tuple[Any, ...] = (0, entry_bytes, [0, row_bytes])
    names, scales = ["bfloat16"] * 2, [None] * 2
    moved_bytes = 2 * 2 * len(entries) * row_bytes
    seconds = device.seconds(partial(torch.ops.torch_uma.write_rows, source, rows, entries, *where, names, scales))
    _share(report, f"write_rows, 2 x {row_bytes} bytes", moved_bytes / seconds, copy_rate)
    seconds = device.seconds(
        partial(torch.ops.torch_uma.gather_rows, source, entries, *where, [width] * 2, names, None, scales)
    )
    _share(report, f"gather_rows, 2 x {row_bytes} bytes", moved_bytes / seconds, copy_rate)


def _share(report: Report, name: str, rate: float, copy_rate: float) -> None:
    report.figure(BANDWIDTH, name, rate / copy_rate, "of a copy", f"{rate / 1e9:,.4g} GB/s")


def _launches(report: Report, device: Device) -> None:
    pool = _pool(device)
    batch = pool.batch([pool.add() for _ in range(4)])
    order = torch.randperm(64, device=device.torch)
    pages = torch.empty(64 * 4096, dtype=torch.uint8, device=device.torch)
    with pool.begin_steps(batch, 8) as multi:
        calls: dict[str, Callable[[], object]] = {
            "relocate 32 pages": partial(torch.ops.torch_uma.relocate, pages, order[:32], order[32:], 0, 4096),
            f"advance over {len(multi.stacks.paged)} sub-pools": multi.stacks.advance,
        }
        for name, call in calls.items():
            call()
            report.figure(LAUNCHES, name, _num_launches(device, call), "launches")
    step = pool.begin(batch, 1)
    step.abort()
    report.figure(
        LAUNCHES, "tables of a step", _num_launches(device, lambda: pool.begin(batch, 1).commit()), "launches"
    )


def _num_launches(device: Device, call: Callable[[], object]) -> int:
    """Kernels and copies on the device; on the CPU, ops."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU] if device.is_dry else [kinds.CPU, kinds.CUDA]) as profile:
        call()
        device.synchronize()
    wanted = "CPU" if device.is_dry else "CUDA"
    return sum(event.device_type.name == wanted for event in profile.events())


def _pool(device: Device, *, split: bool = False, max_tokens: int = 256) -> CachePool:
    layers = layers_of(device.size(8, 4), device.size(128, 16), torch.bfloat16)
    memory = device.size(2 << 30, 32 << 20)
    plan = torch_uma.plan(layers, memory=memory, page_size=16)
    shares = {subpool.name: 1 / len(plan.subpools) for subpool in plan.subpools} if split else None
    return CachePool(plan, max_sequences=512, max_tokens=max_tokens, device=device.torch, split=shares)


def _steps(report: Report, device: Device) -> None:
    """One captured decode over the arena after its pages have moved about, and over fixed pools with the same ops."""
    num_rows, num_steps, past = device.size(64, 4), device.size(4, 2), device.size(900, 40)
    longest = past + NUM_HOST_ROUNDS * (1 + num_steps)
    seconds = {}
    for name, is_split in (("fixed pools", True), ("arena", False)):
        pool = _pool(device, split=is_split, max_tokens=longest)
        pool.arena.bytes.zero_()
        batch = pool.batch([pool.add() for _ in range(num_rows)])
        pool.begin(batch, past).commit()
        if not is_split:
            torch_uma.testing.scramble(pool, 1)
        with pool.begin_steps(batch, num_steps) as multi:
            decode = Decode(device, pool, multi, len(pool.plan.layers), device.size(128, 16))
            replay = device.captured(decode.run, decode.run)

        def whole(pool: CachePool = pool, batch: Any = batch, replay: Any = replay) -> None:
            with pool.begin_steps(batch, num_steps) as multi:
                replay()
                multi.abort()

        with device.without_syncs():
            whole()
        seconds[name] = device.seconds(whole)
        report.figure(STEPS, f"a step over {name}", seconds[name] / num_steps * 1e6, "us", f"{num_rows} rows of {past}")
        if is_split:
            continue
        _host(report, device, pool, batch, num_steps)
    report.figure(STEPS, "arena over fixed pools", seconds["arena"] / seconds["fixed pools"], "of their time")
    report.figure(STEPS, "waits for the device in a captured step", 0, "waits", "an error would have been raised")


def _host(report: Report, device: Device, pool: CachePool, batch: Any, num_steps: int) -> None:
    def begin_and_commit() -> None:
        pool.begin(batch, 1).commit()

    def begin_and_commit_steps() -> None:
        pool.begin_steps(batch, num_steps).commit([num_steps] * len(batch))

    one, several = (
        device.host_seconds(call, num_rounds=NUM_HOST_ROUNDS) for call in (begin_and_commit, begin_and_commit_steps)
    )
    report.figure(STEPS, "host time of a step", one * 1e6, "us", "begin and commit")
    report.figure(STEPS, f"host time of {num_steps} steps in one", several * 1e6, "us", "begin_steps and commit")
