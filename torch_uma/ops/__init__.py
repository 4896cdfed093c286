"""The custom ops `torch.ops.torch_uma.*`: importing this package registers them."""

if __name__ != "torch_uma.ops":
    raise ImportError(f"the ops register once, as torch_uma.ops, and not as {__name__!r}: import torch_uma.ops")

from torch_uma.ops import registration as registration
from torch_uma.ops.reference import dtype_name as dtype_name
