"""Pages that move within the arena, a wave of them in one launch.

Owns the kernel of `relocate`. A tile is some words of some pages; programs take tiles in turns. A word is as wide as
origin and size of the pages allow; where both are multiples of 16 bytes, two words of 8 are read and written at once.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from torch_uma.ops.triton.addresses import place
from torch_uma.ops.triton.launch import Launch, Machine, block_of, machine_of, num_programs

# Words of a tile: with 8 warps, four accesses of 16 bytes for each thread.
_TILE_WORDS = 2048


@triton.jit(do_not_specialize=["num_pairs", "num_pages"])
def relocate_kernel(
    arena,
    src_pages,
    dst_pages,
    num_pairs,
    num_pages,
    first_vector,
    page_vectors,
    WORD: tl.constexpr,
    VECTOR_WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    WORDS: tl.constexpr,
):
    words = arena.to(tl.pointer_type(WORD), bitcast=True)
    page_words = page_vectors * VECTOR_WORDS
    num_parts = tl.cdiv(page_words, WORDS)
    num_tiles = tl.cdiv(num_pairs, PAIRS) * num_parts
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        pair = tile // num_parts * PAIRS + tl.arange(0, PAIRS)
        word = tile % num_parts * WORDS + tl.arange(0, WORDS)
        src = tl.load(src_pages + pair, mask=pair < num_pairs, other=-1)
        dst = tl.load(dst_pages + pair, mask=pair < num_pairs, other=-1)
        tl.device_assert((src < num_pages) & (dst < num_pages), "a page lies outside the arena")
        copied = ((src >= 0) & (dst >= 0))[:, None] & (word < page_words)[None, :]
        source = place(src, first_vector, page_vectors) * VECTOR_WORDS
        target = place(dst, first_vector, page_vectors) * VECTOR_WORDS
        values = tl.load(words + (source[:, None] + word[None, :]), mask=copied)
        tl.store(words + (target[:, None] + word[None, :]), values, mask=copied)


def plan_relocate(
    machine: Machine, arena: Tensor, src_pages: Tensor, dst_pages: Tensor, origin_bytes: int, page_bytes: int
) -> Launch:
    """The launch of `relocate`, of at least one pair of pages."""
    vector_bytes = math.gcd(origin_bytes, page_bytes, 16)
    word_bytes = min(vector_bytes, 8)
    page_words = page_bytes // word_bytes
    block_words = block_of(page_words, least=128, most=_TILE_WORDS)
    block_pairs = _TILE_WORDS // block_words
    num_pairs = len(src_pages)
    num_tiles = -(-num_pairs // block_pairs) * -(-page_words // block_words)
    return Launch(
        kernel=relocate_kernel,
        num_programs=num_programs(machine, num_tiles),
        arguments=(
            arena,
            src_pages.contiguous(),
            dst_pages.contiguous(),
            num_pairs,
            (arena.numel() - origin_bytes) // page_bytes,
            origin_bytes // vector_bytes,
            page_bytes // vector_bytes,
        ),
        constants={
            "WORD": getattr(tl, f"int{8 * word_bytes}"),
            "VECTOR_WORDS": vector_bytes // word_bytes,
            "PAIRS": block_pairs,
            "WORDS": block_words,
        },
        num_warps=8,
    )


def relocate(arena: Tensor, src_pages: Tensor, dst_pages: Tensor, origin_bytes: int, page_bytes: int) -> None:
    """`reference.relocate`."""
    if len(src_pages):
        plan_relocate(machine_of(arena.device), arena, src_pages, dst_pages, origin_bytes, page_bytes).run(arena)
