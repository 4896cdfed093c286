"""The proof, as one command: traces against the exact fit, changing traffic against pools, an hour in a minute.

Owns nothing but their order: each comparison is a script of its own, with more options, and says there what it is. All
of it is simulated on the CPU.

    python benchmarks/serving.py --trace AzureLLMInferenceTrace_conv.csv --json serving.json
    python benchmarks/serving.py --quick
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from records import Record, parser

HERE = Path(__file__).resolve().parent


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, metavar="PATH", help="AzureLLMInferenceTrace_conv.csv")
    options.add_argument("--quick", action="store_true", help="short requests, short phases, a minute of the hour")
    given = options.parse_args()
    quick = ["--quick"] if given.quick else []
    comparisons = {
        "traces.py": [*quick, *(["--trace", str(given.trace)] if given.trace else [])],
        "traffic.py": quick,
        "simulated_hour.py": ["--hours", str(1 / 60)] if given.quick else [],
    }
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for script, asked in comparisons.items():
            path = Path(folder) / f"{script}.json"
            print(f"== {script}", flush=True)
            subprocess.run([sys.executable, str(HERE / script), "--json", str(path), *asked], check=True)
            records += [entry | {"script": script} for entry in json.loads(path.read_text())]
    if given.json is not None:
        given.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
