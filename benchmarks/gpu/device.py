"""The machine that a run is on: what it captures and times, with the CPU in its place in a dry run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the device, about five milliseconds: longer than the host takes to enqueue anything that is timed.
_HOST_CYCLES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a run happens. In a dry run sizes are small, a capture is a call, and synchronising is nothing."""

    is_dry: bool

    @property
    def torch(self) -> torch.device:
        """The device of tensors."""
        return torch.device("cpu" if self.is_dry else "cuda")

    def size(self, full: int, dry: int) -> int:
        """A size for the GPU, or for a dry run."""
        return dry if self.is_dry else full

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def describe(self) -> dict[str, str]:
        """What is worth knowing of the machine."""
        name = "no GPU, a dry run: no figure means anything" if self.is_dry else torch.cuda.get_device_name()
        return {"device": name, "torch": torch.__version__, "CUDA": str(torch.version.cuda)}

    def captured(self, call: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        """`call` as a CUDA graph, after `warm_up`, which has it compile what it needs."""
        warm_up()
        if self.is_dry:
            return call
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            call()
        return graph.replay

    @contextmanager
    def without_syncs(self) -> Iterator[None]:
        """Any wait for the device in here is an error."""
        if self.is_dry:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def seconds(self, call: Callable[[], object], *, num_rounds: int = 20) -> float:
        """Median seconds that the device takes for `call`, after two calls to warm up.

        The device is kept busy while the host enqueues the call, or what the host takes for it would be counted too.
        """
        rounds = self.size(num_rounds, 2)
        for _ in range(2):
            call()
        times = []
        for _ in range(rounds):
            self.synchronize()
            if self.is_dry:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HOST_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def host_seconds(self, call: Callable[[], object], *, num_rounds: int) -> float:
        """Median seconds that the host takes for `call`, with the device idle before each."""
        times = []
        for _ in range(num_rounds):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def poisoned(self, num_bytes: int) -> Tensor:
        """An arena of NaN in every float dtype, uint8 [num_bytes]; what is made next comes from poisoned memory too."""
        scrap = torch.full((max(num_bytes, 1 << 20),), 0xFF, dtype=torch.uint8, device=self.torch)
        arena = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=self.torch)
        del scrap
        return arena
