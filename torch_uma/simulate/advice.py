"""What a report says of the settings that it came from, in sentences: what was gained, and what to set otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from torch_uma.simulate.report import Report

_MANY_RETRACTIONS = 50  # for each 1,000 completed
_LITTLE_USED = 0.6  # of the arena, on the mean
_ALIKE = 0.005  # figures that differ by less are


def advice(reports: Mapping[str, Report], *, max_running: int, arena_bytes: int) -> list[str]:
    """Sentences on the report "arena" and, beside it, on those of fixed pools."""
    arena = reports["arena"]
    pools = {name: report for name, report in reports.items() if name != "arena"}
    if pools and len(arena.used_bytes) == 1:
        said = ["this model has one kind of memory, so there is nothing to divide: one arena and pools are the same"]
    else:
        said = [_gain(arena, name, report) for name, report in pools.items()]
    return [*said, _settings(arena, max_running, sum(arena.used_bytes.values()) / arena_bytes)]


def _settings(arena: Report, max_running: int, used: float) -> str:
    if arena.num_refused:
        return f"{arena.num_refused:,} requests are longer than the arena can hold: give it more memory"
    if arena.retractions_per_1000 > _MANY_RETRACTIONS:
        share = arena.recomputed_tokens / max(1, arena.num_completed)
        host_memory = ", host_memory," if arena.recomputed_tokens else ""
        return (
            f"{arena.retractions_per_1000:,.0f} retractions for each 1,000 requests, and {share:,.0f} tokens computed "
            f"again for each: try more headroom_steps{host_memory} or a smaller max_running"
        )
    if arena.max_running == max_running and used < _LITTLE_USED:
        return (
            f"as many ran as max_running={max_running} allows, in {used:.0%} of the arena: raise it, or give it less "
            "memory"
        )
    if used < _LITTLE_USED and not arena.dropped + arena.offloaded:
        return (
            f"{used:.0%} of the arena was in use on the mean, and nobody was retracted: try less memory, or more "
            "requests a second"
        )
    return (
        f"at most {arena.max_running:,} of the {max_running:,} allowed ran at once, in {used:.0%} of the arena on the "
        "mean, and few were retracted: the settings suit this traffic"
    )


def _gain(arena: Report, name: str, report: Report) -> str:
    if not report.num_completed:
        return f"one arena against {name}: these pools completed nothing"
    tokens = round(arena.new_tokens_per_s / report.new_tokens_per_s - 1, 3) + 0.0  # which makes 0 of -0
    running = round(arena.time_mean_running / report.time_mean_running - 1, 3) + 0.0
    first, other = arena.first_token_s["mean"], report.first_token_s["mean"]
    more = report.num_refused - arena.num_refused
    if not more and max(abs(tokens), abs(running), abs(first / other - 1)) < _ALIKE:
        return f"one arena against {name}: no difference"
    return (
        f"one arena against {name}: {tokens:+.1%} new tokens a second, {running:+.1%} running, first token after "
        f"{first:.3g} s instead of {other:.3g} s"
        + (f"; these pools refused {more:,} more, which the arena served as well" if more > 0 else "")
    )
