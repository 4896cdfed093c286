/* Copies of many byte ranges within one memory, in one call that Python's lock is not held for.

   Knows nothing of Python: `host_copy.py` loads it through ctypes, and does without it where it could not be built. */

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* Range i is `sizes[i]` bytes from `base + sources[i]` to `base + destinations[i]`; no two ranges overlap. Threads that
   are given the same `next`, which starts at 0, share the ranges: each takes `num_at_once` whenever it is done. */
void torch_uma_copy_ranges(char *base, const int64_t *sources, const int64_t *destinations, const int64_t *sizes,
                           int64_t num_ranges, int64_t num_at_once, _Atomic int64_t *next) {
    int64_t start;
    while ((start = atomic_fetch_add(next, num_at_once)) < num_ranges) {
        int64_t end = start + num_at_once < num_ranges ? start + num_at_once : num_ranges;
        for (int64_t i = start; i < end; i++) {
            memcpy(base + destinations[i], base + sources[i], (size_t)sizes[i]);
        }
    }
}
