"""Conversations over one arena, all behind one system prompt, whose pages they share until they differ.

Run it with `python examples/chat.py`. The model is tiny and random, so what it says is noise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny_models import VOCABULARY, build

from torch_uma import CachePool, UnifiedCache

SYSTEM = "You are a patient guide through a small museum of clocks. Answer in one short sentence. "
NUM_NEW_TOKENS = 24
NO_BYTES = list(range(256, VOCABULARY))


def encoded(words: str) -> torch.Tensor:
    """A token for each byte, [1, tokens]."""
    return torch.tensor([list(words.encode())])


class Chat:
    """One conversation: its whole text, and a fork of the cache that holds the system prompt."""

    def __init__(self, model: Any, system: UnifiedCache) -> None:
        self.model, self.cache, self.text = model, copy.deepcopy(system), encoded(SYSTEM)

    def say(self, words: str) -> str:
        """The answer to `words`; only what the cache does not hold yet is computed."""
        text = torch.cat([self.text, encoded(words)], dim=1)
        self.text = self.model.generate(text, cache=self.cache, max_new_tokens=NUM_NEW_TOKENS, suppress_tokens=NO_BYTES)
        return bytes(self.text[0, text.shape[1] :].tolist()).decode(errors="replace")


def main() -> None:
    torch.set_num_threads(1)  # matrices this small only lose by being split
    model = build("qwen3_next", attention="torch_uma")
    model.generation_config.do_sample = False
    with CachePool(model, memory="2MiB", page_size=8) as pool:
        system = UnifiedCache(model, pool=pool)
        with torch.no_grad():
            model(encoded(SYSTEM), cache=system)
        print(f"the system prompt takes {pool.stats().live_bytes} bytes")
        chats = [Chat(model, system) for _ in range(3)]
        print(f"with {len(chats)} conversations behind it {pool.stats().live_bytes}")
        for turn in ("Which is the oldest? ", "And who made it? "):
            for number, chat in enumerate(chats):
                print(f"{number}: {turn}{chat.say(f'{number} {turn}')!r}")
            print(f"{pool.stats().live_bytes} bytes for texts of {[chat.text.shape[1] for chat in chats]} tokens")


if __name__ == "__main__":
    main()
