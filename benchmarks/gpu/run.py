"""The whole run, into one Markdown file and one JSON file: correctness first, then figures.

What compiles for minutes comes last: models, and FlashInfer. Both are skipped with a word where they are not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch

from gpu.check_flashinfer import check_flashinfer
from gpu.check_graphs import check_graphs
from gpu.check_offload import check_offload
from gpu.check_ops import check_ops
from gpu.device import Device
from gpu.figures import take_figures
from gpu.report import Report

LIMIT_S = 480  # no check begins later than that

_COMMAND = "benchmarks/gpu/run.sh"


def main() -> int:
    """Run it; 1 if a check failed."""
    options = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    options.add_argument("folder", type=Path, help="where gpu.md and gpu.json are written")
    options.add_argument("--dry", action="store_true", help="small, on the CPU; by itself where there is no GPU")
    given = options.parse_args()
    device = Device(is_dry=given.dry or not torch.cuda.is_available())
    seed = 0 if device.is_dry else int(time.time())
    torch.manual_seed(seed)
    report = Report(given.folder, device.describe() | {"seed": str(seed), "command": f"{_COMMAND} FOLDER"}, LIMIT_S)
    torch.backends.cudnn.allow_tf32 = False  # products are already in fp32, and tokens are compared
    check_ops(report, device)
    check_graphs(report, device)
    check_offload(report, device)
    take_figures(report, device)
    if importlib.util.find_spec("transformers") is None:
        report.skip("Models", "all", "transformers is not installed")
    else:
        from gpu.check_models import check_models

        check_models(report, device)
    check_flashinfer(report, device)
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
