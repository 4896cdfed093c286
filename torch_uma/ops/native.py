"""The loops of this package that are written in C, and the functions of torch that they call.

Owns the search for both. The loops are optional: without a compiler at installation there is no library, and whoever
has a loop there does without it.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

# In the order of `struct torch` in attend_pieces.c.
_FUNCTIONS = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_strides",
    "aoti_torch_delete_tensor_object",
    "torch_parallel_for",
)


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None where the package was installed without a C compiler."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return ctypes.CDLL(str(path))
    return None


@functools.cache
def torch_functions() -> ctypes.Array[ctypes.c_void_p] | None:
    """Functions of torch's stable C interface, for the library; None if this build of torch has them not, or not all.

    A call through it has a tenth of the cost that one from Python has.
    """
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            if all(hasattr(library, function) for function in _FUNCTIONS):
                addresses = [ctypes.cast(getattr(library, function), ctypes.c_void_p) for function in _FUNCTIONS]
                return (ctypes.c_void_p * len(addresses))(*addresses)
    return None
