"""What the machine's GPU is called: as its driver says in /proc, so that no context is made and nothing is waked for it."""

from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")  # one folder a device, with a file `information`


def named(environ: Mapping[str, str], driver: Path = DRIVER) -> str:
    """The model of the first GPU, as all of a machine are alike; `cpu` where there is none, or this process may see none."""
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "cpu"
    for file in sorted(driver.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key == "Model" and value.strip():
                return value.strip()
    return "cpu"
