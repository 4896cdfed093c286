"""The example of several conversations: the answers of conversations of their own, and a prompt that is held once."""

from __future__ import annotations

import chat
import pytest
import torch
from models import build
from old_versions import IS_OLD

from torch_uma import CachePool, UnifiedCache

torch.set_num_threads(1)


CASES = [("qwen3_next", "torch_uma"), ("gpt_oss", "eager"), *([] if IS_OLD else [("mamba2", "eager")])]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_conversations_share_the_system_prompt_and_nothing_else(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    with CachePool(model, memory="2MiB", page_size=8) as pool:
        system = UnifiedCache(model, pool=pool)
        with torch.no_grad():
            model(chat.encoded(chat.SYSTEM), cache=system)
        alone = pool.stats().live_bytes
        chats = [chat.Chat(model, system) for _ in range(3)]
        assert pool.stats().live_bytes == alone
        for number, one in enumerate(chats):
            for turn in ("which", "and who"):
                text = torch.cat([one.text, chat.encoded(f"{turn} {number}")], dim=1)
                one.say(f"{turn} {number}")
                reference = model.generate(
                    text,
                    max_new_tokens=chat.NUM_NEW_TOKENS,
                    suppress_tokens=chat.NO_BYTES,
                    do_sample=False,
                    use_cache=False,
                )
                assert torch.equal(one.text, reference)
        full = next((subpool for subpool in pool.stats().subpools if subpool.name == "full"), None)
        if full is not None:
            shared = len(chat.SYSTEM) // 8
            own = [-(-one.cache.get_seq_length() // 8) - shared for one in chats]
            assert shared + sum(own) <= full.live_pages <= 2 * shared + sum(own)  # the system prompt has room behind it
        pool.check()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    chat.main()
    assert len(capsys.readouterr().out.splitlines()) == 10
