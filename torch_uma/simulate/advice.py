"""What a report says of the settings that it came from, in sentences: what was gained, and what to set otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from torch_uma.simulate.report import Report

_MANY_RETRACTIONS = 50  # for each 1,000 completed
_LITTLE_USED = 0.6  # of the arena, on the mean


def advice(reports: Mapping[str, Report], *, max_running: int, arena_bytes: int) -> list[str]:
    """Sentences on the report "arena" and, beside it, on those of fixed pools."""
    arena = reports["arena"]
    said = [_gain(arena, name, report) for name, report in reports.items() if name != "arena"]
    if arena.num_refused:
        said.append(f"{arena.num_refused:,} requests are longer than the arena can hold: give it more memory")
    used = sum(arena.used_bytes.values()) / arena_bytes
    if arena.max_running == max_running and used < _LITTLE_USED:
        said.append(
            f"as many ran as max_running={max_running} allows, in {used:.0%} of the arena: raise it, or give it less "
            "memory"
        )
    elif used < _LITTLE_USED and not arena.dropped + arena.offloaded:
        said.append(f"{used:.0%} of the arena was in use on the mean, and nobody was retracted: less memory would do")
    if arena.retractions_per_1000 > _MANY_RETRACTIONS:
        share = arena.recomputed_tokens / max(1, arena.num_completed)
        said.append(
            f"{arena.retractions_per_1000:,.0f} retractions for each 1,000 requests, and {share:,.0f} tokens computed "
            "again for each: try more headroom_steps, host_memory, or a smaller max_running"
        )
    return said


def _gain(arena: Report, name: str, report: Report) -> str:
    if not report.num_completed:
        return f"one arena against {name}: these pools completed nothing"
    gain = arena.new_tokens_per_s / report.new_tokens_per_s - 1
    running = arena.time_mean_running / report.time_mean_running - 1
    more = report.num_refused - arena.num_refused
    return (
        f"one arena against {name}: {gain:+.1%} new tokens a second, {running:+.1%} running, first token after "
        f"{arena.first_token_s['mean']:.3g} s instead of {report.first_token_s['mean']:.3g} s"
        + (f"; these pools refused {more:,} more, which the arena served as well" if more > 0 else "")
    )
