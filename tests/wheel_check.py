"""Builds the wheel, installs it into a second environment and imports every module of it there.

The second environment sees this one's packages through a path file, except the editable install of torch-uma itself:
path files inside a directory that a path file names are not read.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

IMPORT_EVERYTHING = """
import importlib, importlib.util, pkgutil, sys
import torch_uma

names = [module.name for module in pkgutil.walk_packages(torch_uma.__path__, "torch_uma.")]
names = [name for name in names if name != "torch_uma.ops._native"]  # a library, and no module of Python
if importlib.util.find_spec("triton") is None:  # there is none but for Linux
    names = [name for name in names if not name.startswith("torch_uma.ops.triton")]
for name in names:
    path = importlib.import_module(name).__file__
    assert path.startswith(sys.prefix), f"{name} was imported from {path}, not from the wheel"
from torch_uma.ops.native import native
print(f"{len(names)} modules of the wheel import, {'with' if native() else 'without'} the loops in C")
"""


def main() -> None:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # modules left there by an older build would be packed too
    pip = [sys.executable, "-m", "pip", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        wheels, environment = Path(folder, "wheels"), Path(folder, "environment")
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT], check=True)
        (wheel,) = wheels.glob("*.whl")

        venv.create(environment)
        python = environment / "bin" / "python"
        query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        Path(site, "first_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
        subprocess.run([python, "-c", IMPORT_EVERYTHING], check=True, cwd=folder)


if __name__ == "__main__":
    main()
