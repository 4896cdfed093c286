"""The ops on CUDA, as Triton kernels; importing this imports triton.

Each function here does what the one of the same name among the references says. None of them looks at a number on the
device, and none makes a tensor other than its results, unless it has to lay out an argument anew. A page, entry or cell
outside its tensor fails an assertion on the device, as in torch's own kernels.
"""

from torch_uma.ops.triton.copies import relocate as relocate
from torch_uma.ops.triton.csr import page_index as page_index
from torch_uma.ops.triton.rows import gather_rows as gather_rows
from torch_uma.ops.triton.rows import write_rows as write_rows
from torch_uma.ops.triton.stack import allocate as allocate
from torch_uma.ops.triton.stack import release as release
from torch_uma.ops.triton.tables import locate as locate
from torch_uma.ops.triton.tables import remap as remap
