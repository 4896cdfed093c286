"""Where pages, entries and rows lie, as kernels compute it: in 64 bits."""

import triton
import triton.language as tl


@triton.jit
def place(index, first, stride):
    """Where the thing of this number lies, on a line where the first begins at `first` and each takes `stride`."""
    return index.to(tl.int64) * stride + first
