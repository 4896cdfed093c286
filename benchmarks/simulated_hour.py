"""What an hour of simulated traffic takes of a processor: gpt-oss-20b on one H200, simulated.

Requests with prompts of 1,000 and answers of 200 tokens on the mean, log-normal, 20 of them a second, in an arena of
60 GiB. The figure is CPU time of the thread, so that what else runs on the machine counts little.

    python benchmarks/simulated_hour.py --json simulated_hour.json
    python benchmarks/simulated_hour.py --hours 0.1
"""

from __future__ import annotations

import time

from records import parser, publish, record
from transformers import GptOssConfig

from torch_uma.integrations.transformers.counting import work_of
from torch_uma.plan import plan
from torch_uma.simulate import DEVICES, generate_trace, replay

RATE_PER_S = 20


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--hours", type=float, default=1.0, help="of simulated traffic (default: 1)")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    arrivals = generate_trace(
        int(3600 * RATE_PER_S * given.hours),
        prompt_tokens=1000,
        new_tokens=200,
        spread=0.5,
        rate_per_s=RATE_PER_S,
        seed=given.seed,
    )
    planned, work = plan(config, memory="60GiB", page_size=16), work_of(config)
    began = time.thread_time()
    report = replay(planned, arrivals, work=work, device=DEVICES["h200"], max_running=512)
    cpu_s = time.thread_time() - began
    case = f"{given.hours:g} h of {RATE_PER_S} requests a second"
    records = [
        record(case, "cpu", cpu_s, "s"),
        record(case, "cpu_of_a_round", 1e6 * cpu_s / report.num_rounds, "us"),
        record(case, "rounds", report.num_rounds, "rounds"),
        record(case, "completed", report.num_completed, "requests"),
        record(case, "simulated", report.seconds, "s"),
    ]
    publish(records, given.json)


if __name__ == "__main__":
    main()
