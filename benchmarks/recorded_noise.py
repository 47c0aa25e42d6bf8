"""The noise of the recordings in tables/: how much servers, epochs and windows differ.

python benchmarks/recorded_noise.py [dlrm mlp ...]
"""

from __future__ import annotations

import argparse

from lib.output import print_head, row
from lib.recordings import PLANS, TABLES, recorded_noise

HEAD = ("table", *(f"{part}: {of}" for part in ("server", "epoch", "window") for of in ("infer/s", "tail")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = [name for name in PLANS if (TABLES / f"{name}.csv").exists()]
    parser.add_argument("names", nargs="*", metavar="NAME", default=recorded)
    arguments = parser.parse_args()
    print_head(*HEAD)
    for name in arguments.names:
        noise = recorded_noise(name)
        print(row(name, *(f"{value:.1%}" for part in (noise.server, noise.epoch, noise.window) for value in part)))


if __name__ == "__main__":
    main()
