"""What the Triton kernels become for GPUs that need not be here: registers, spills, and the widths of their accesses.

Each launch is compiled as it would be on such a GPU, with what Triton makes of its very arguments, and disassembled.
Writes a table to docs/benchmarks/kernels.md, or `--table`.

python benchmarks/compiled_kernels.py --json kernels.json
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from records import Record, parser, publish, record
from triton.backends.compiler import GPUTarget

from torch_uma.ops.triton import copies, csr, rows, stack, tables
from torch_uma.ops.triton.launch import Launch, Machine
from torch_uma.ops.triton.segments import segments_of

TARGETS = (80, 90, 100)
TABLE = Path(__file__).resolve().parent.parent / "docs/benchmarks/kernels.md"
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

ARENA = torch.zeros(4096, dtype=torch.uint8)
INDEX = torch.arange(6)
COUNTS = INDEX.int()
PAGE_TABLE = torch.zeros(8, 64, dtype=torch.int32)
V2P = torch.zeros(64, dtype=torch.int32)

BF16, FP32, E4M3, E5M2, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a kernel became.

    Attributes:
        registers: of each thread.
        spilled_bytes: of each thread, in local memory, its stack included.
        loads, stores: accesses of global memory in its code, by their width in bits.
    """

    registers: int
    spilled_bytes: int
    loads: Counter[int]
    stores: Counter[int]


class _Driver:
    """Triton's view of a GPU of some target. Nothing runs on it; its number keeps targets apart in Triton's caches."""

    def __init__(self, target: int) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._target, 32)


def compiled(launch: Launch, target: int) -> bytes:
    """The machine code of a launch, for compute capability `target / 10`."""
    triton.runtime.driver.set_active(_Driver(target))
    try:
        kernel = launch.kernel.warmup(*launch.arguments, grid=(launch.num_programs,), **launch.options)
    finally:
        if torch.cuda.is_available():  # otherwise there is none to go back to
            triton.runtime.driver.reset_active()
    code: bytes = kernel.asm["cubin"]
    return code


def look_at(code: bytes) -> Figures:
    """The figures of machine code, from its disassembly."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(code)
        usage, listing = (
            subprocess.run([CUOBJDUMP, option, path], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    (used,) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    registers, stack_bytes, local_bytes = map(int, used)
    return Figures(
        registers=registers,
        spilled_bytes=stack_bytes + local_bytes,
        loads=_widths(listing, "LDG"),
        stores=_widths(listing, "STG"),
    )


def _widths(listing: str, instruction: str) -> Counter[int]:
    """Accesses by their width in bits; an instruction that names none has 32."""
    accesses = re.findall(rf"\b{instruction}((?:\.\w+)*)", listing)
    return Counter(int((re.findall(r"\.U?S?(8|16|64|128)\b", access) or ["32"])[0]) for access in accesses)


def relocate(page_bytes: int) -> Callable[[Machine], Launch]:
    return lambda machine: copies.plan_relocate(machine, ARENA, INDEX, INDEX, page_bytes, page_bytes)


def rows_of(
    kinds: list[tuple[torch.dtype, torch.dtype]], *, writes: bool, width: int = 128, scale: torch.Tensor | None = None
) -> Callable[[Machine], Launch]:
    """Rows of 8 heads, each of the caller's dtype and as stored, for 2 by 3 entries; keys as models have them."""
    entries = INDEX.view(2, 3)

    def plan(machine: Machine) -> Launch:
        segments = []
        for i, (caller, stored) in enumerate(kinds):
            keys = torch.empty(2, 8, 3, width, dtype=caller).transpose(1, 2)
            values = keys if writes else torch.empty(2, 3, 8 * width, dtype=caller)
            segments.append(
                segments_of(values, entries, scale, stored, writes=writes, first_bytes=8192 * i, entry_bytes=65536)
            )
        return rows.plan_rows(machine, ARENA, entries, segments, writes=writes)

    return plan


def page_index(first_pages: torch.Tensor | None) -> Callable[[Machine], Launch]:
    results = (torch.empty_like(COUNTS), torch.empty_like(V2P), torch.empty_like(COUNTS))
    return lambda machine: csr.plan_page_index(PAGE_TABLE, V2P, INDEX, COUNTS, first_pages, results, 16)


BY_ENTRY, BY_NUMBER = torch.ones(2, 3, 1), torch.ones(1024)

# Those that move aligned pages and rows: all that they read and write of these is 16 bytes wide.
ALIGNED: dict[str, Callable[[Machine], Launch]] = {
    "relocate, pages of 64 KiB": relocate(65536),
    "relocate, pages of 4112 bytes": relocate(4112),
    "write k, v: bfloat16": rows_of([(BF16, BF16)] * 2, writes=True),
    "gather k, v: bfloat16": rows_of([(BF16, BF16)] * 2, writes=False),
    "write a state: float32": rows_of([(FP32, FP32)], writes=True),
    "gather a state: float32": rows_of([(FP32, FP32)], writes=False),
    "write k, v: bfloat16 to e4m3, scaled by entry": rows_of([(BF16, E4M3)] * 2, writes=True, scale=BY_ENTRY),
    "gather k, v: e4m3 to bfloat16, scaled by entry": rows_of([(BF16, E4M3)] * 2, writes=False, scale=BY_ENTRY),
    "write: bfloat16 to int8, scaled by number": rows_of([(BF16, INT8)], writes=True, scale=BY_NUMBER),
    "gather: int8 to bfloat16, scaled by number": rows_of([(BF16, INT8)], writes=False, scale=BY_NUMBER),
    "write three: bfloat16 to e5m2, float32, bfloat16 to int8": rows_of(
        [(BF16, E5M2), (FP32, FP32), (BF16, INT8)], writes=True
    ),
    "gather three: e5m2 to bfloat16, float32, bfloat16": rows_of(
        [(BF16, E5M2), (FP32, FP32), (BF16, BF16)], writes=False
    ),
}

OTHERS: dict[str, Callable[[Machine], Launch]] = {
    "relocate, pages of 24 bytes": relocate(24),
    "write k: bfloat16, heads of 6": rows_of([(BF16, BF16)], writes=True, width=6),
    "remap": lambda machine: tables.plan_remap(V2P, INDEX, COUNTS),
    "locate": lambda machine: tables.plan_locate(machine, PAGE_TABLE, V2P, INDEX, INDEX.view(6, 1), INDEX, 16, 1),
    "allocate": lambda machine: stack.plan_allocate(PAGE_TABLE, COUNTS[:1], V2P, INDEX, COUNTS, 16),
    "release": lambda machine: stack.plan_release(PAGE_TABLE, COUNTS[:1], V2P, INDEX, COUNTS, COUNTS, 16),
    "page_index": page_index(None),
    "page_index of windows": page_index(COUNTS),
}


def figures(plan: Callable[[Machine], Launch], target: int) -> Figures:
    """What a launch becomes on a GPU of this target."""
    machine = Machine(num_multiprocessors=132, converts_float8=target >= 89)
    return look_at(compiled(plan(machine), target))


def _listed(widths: Counter[int]) -> str:
    return ", ".join(f"{count} × {width}" for width, count in sorted(widths.items(), reverse=True)) or "–"


def table(measured: dict[str, dict[int, Figures]]) -> str:
    """The page that docs/benchmarks/kernels.md is."""
    lines = [
        "# What the kernels become",
        "",
        "`python benchmarks/compiled_kernels.py` ([compiled_kernels.py](../../benchmarks/compiled_kernels.py)) with "
        f"Triton {triton.__version__}:",
        "compiled and disassembled without a GPU, for launches with these arguments. Spills are bytes of local memory",
        "a thread. Loads and stores are instructions on global memory, by their width in bits; narrow loads beside",
        "wide ones are of page numbers, entries and scales. Nothing here was run.",
        "",
        "| launch | GPU | registers | spills | loads | stores |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, by_target in measured.items():
        for target, found in by_target.items():
            accesses = f"{_listed(found.loads)} | {_listed(found.stores)}"
            lines.append(f"| {name} | sm_{target} | {found.registers} | {found.spilled_bytes} | {accesses} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--table", type=Path, default=TABLE, metavar="PATH", help="where the table goes")
    arguments = options.parse_args()
    measured = {
        name: {target: figures(plan, target) for target in TARGETS} for name, plan in (ALIGNED | OTHERS).items()
    }
    arguments.table.parent.mkdir(exist_ok=True)
    arguments.table.write_text(table(measured))
    records: list[Record] = []
    for name, by_target in measured.items():
        for target, found in by_target.items():
            case = f"{name}, sm_{target}"
            records.append(record(case, "registers", found.registers, "per thread"))
            records.append(record(case, "spills", found.spilled_bytes, "bytes per thread"))
            for metric, widths in (("loads", found.loads), ("stores", found.stores)):
                records += [record(case, metric, count, f"of {width} bits") for width, count in widths.items()]
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
