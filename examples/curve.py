#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws the half-baking curves that evaluate.py prints. Needs matplotlib.

    $ python examples/evaluate.py runs/pirate runs/french > measured.md
    $ python examples/curve.py measured.md curve.svg
"""
import re
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

# Text and axes in a grey that can be read on a light page and on a dark one.
GREY = "#808080"
GREYS = ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"]

def read_curves(markdown: str) -> dict:
    """-> {name of the adapter: [(scale, KL to the prompted model)]}."""
    curves = {}
    for section in re.split("^## ", markdown, flags=re.M)[1:]:
        folder = section.split("\n")[0]
        table = section[section.index("| scale |"):]
        points = re.findall(r"^\| ([\d.]+) \| ([\d.]+)", table, re.M)
        curves[Path(folder).name] = [(float(scale), float(kl)) for scale, kl in points]
    return curves

def main(markdown: str, picture: str):
    # The salt and the date make the same file of the same numbers.
    svg = {"svg.fonttype": "none", "svg.hashsalt": "bake.py"}
    matplotlib.rcParams.update(dict.fromkeys(GREYS, GREY) | svg)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, points in read_curves(Path(markdown).read_text()).items():
        axes.plot(*zip(*points), marker="o", markersize=3, label=name)
    axes.set_xlabel("scale of the adapter")
    axes.set_ylabel("KL to the prompted model, nats per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(picture, transparent=True, bbox_inches="tight", metadata={"Date": None})

if __name__ == "__main__":
    main(*sys.argv[1:])
