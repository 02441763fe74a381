"""Write the golden files, or check that the stored ones can still be reproduced.

    python tests/reference/make_goldens.py [--out tests/goldens] [--only CASE ...] [--check]

`--check` regenerates into a temporary folder, prints every case and tensor that moved, and exits with 1 if any did.
"""

import argparse
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import compare
import drafters
import glm
import gpt_oss
import mxfp4
import pairs
import qwen3
import qwen3_5_moe
import torch
import transformers
import warpers

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
CASES: dict[str, Callable[[str, Path], None]] = {
    **dict.fromkeys(gpt_oss.GPT_OSS_CASES, gpt_oss.build),
    **dict.fromkeys(qwen3.QWEN3_CASES, qwen3.build),
    **dict.fromkeys(glm.CASES, glm.build),
    **dict.fromkeys(qwen3_5_moe.CASES, qwen3_5_moe.build),
    **dict.fromkeys(drafters.DRAFTER_CASES, drafters.build),
    **dict.fromkeys(pairs.PAIR_CASES, pairs.build),
    "mxfp4_decode": mxfp4.build,
    "warpers": warpers.build,
}


def write(names: list[str], out: Path) -> None:
    """Write the named cases, each from an empty folder."""
    for name in names:
        shutil.rmtree(out / name, ignore_errors=True)
        CASES[name](name, out / name)
        size = sum(path.stat().st_size for path in (out / name).rglob("*") if path.is_file())
        print(f"{name}: {size / 1024:.0f} KiB", flush=True)


def check(names: list[str], out: Path) -> int:
    """Regenerate the named cases next door and count those that moved."""
    moved = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            fresh = Path(temporary) / name
            CASES[name](name, fresh)
            lines = compare.compare_case(out / name, fresh)
            moved += bool(lines)
            print(f"{name}: {'MOVED' if lines else 'same'}", *lines, sep="\n  ", flush=True)
    strangers = sorted(path.name for path in out.iterdir() if path.is_dir() and path.name not in CASES)
    if strangers:
        print(f"no case makes {', '.join(strangers)}")
    return moved + len(strangers)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GOLDENS, help="folder of the goldens")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="just these cases")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = arguments.only or list(CASES)
    if arguments.check:
        return 1 if check(names, arguments.out) else 0
    write(names, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
