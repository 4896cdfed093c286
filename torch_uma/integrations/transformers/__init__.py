"""transformers: the cache that `generate()` and a loop's forward passes use."""

from torch_uma.integrations.transformers.cache import UnifiedCache

__all__ = ["UnifiedCache"]
