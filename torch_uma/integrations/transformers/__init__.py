"""transformers: the cache that `generate()` and a loop's forward passes use, and attention that reads the arena.

Importing it registers `attn_implementation="torch_uma"`.
"""

from torch_uma.integrations.transformers import attention as attention
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.integrations.transformers.serving.batch import generate_batch
from torch_uma.integrations.transformers.serving.generation import Event, Generation
from torch_uma.integrations.transformers.serving.loop import ServingLoop
from torch_uma.integrations.transformers.speculation import speculate

__all__ = ["Event", "Generation", "ServingLoop", "UnifiedCache", "generate_batch", "speculate"]

attention.register()
