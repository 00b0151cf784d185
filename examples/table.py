#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints a Markdown row for each prompt: means over its runs, ± the standard deviation over them.

    $ python examples/table.py runs/pirate-0 runs/pirate-1 runs/french-0

Runs share a row if they differ in their seeds alone. Its name is the first folder's, less "-SEED";
prompt tokens are what the teacher reads beyond the student. – is a number that a run has not got.
"""
import json
import re
import sys
from pathlib import Path

import numpy as np
import transformers

MAY_DIFFER = ["seed", "split_seed", "out", "micro_batch_size", "gradient_checkpointing"]

def read_run(folder: Path) -> tuple:
    """-> what the runs of a row have in common, and the report, with name and prompt_tokens."""
    report = json.loads((folder / "report.json").read_text())
    settings = json.loads((folder / "args.json").read_text())
    for name in MAY_DIFFER:
        settings.pop(name, None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    examples = [json.loads(line) for line in open(folder / "examples.jsonl")]
    prompts = [example["messages"][0]["content"] for example in examples]
    report["prompt_tokens"] = np.mean([len(tokenizer.tokenize(prompt)) for prompt in prompts])
    times = [(folder / name).stat().st_mtime for name in ("args.json", "report.json")]
    report["minutes"] = (times[1] - times[0]) / 60
    report["name"] = re.sub(r"-\d+$", "", folder.resolve().name)
    return json.dumps([report["prompt"], settings], sort_keys=True), report

def cell(runs: list, key: str, digits: int = 3, absent: str = "–") -> str:
    """The mean over the runs ± its standard deviation, or `absent` if one of them has no such."""
    values = [run.get(key) for run in runs]
    if None in values:
        return absent
    mean = f"{np.mean(values):z.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(runs) > 1 else mean

def main(folders: list[str]):
    rows = {}
    for folder in folders:
        if not (Path(folder) / "report.json").exists():
            print(f"{folder} is left out: it holds no report.json", file=sys.stderr)
            continue
        settings, report = read_run(Path(folder))
        rows.setdefault(settings, []).append(report)

    print("| prompt | prompt tokens | runs | KL | recovered | top-1 | minutes |")
    print("|---|---|---|---|---|---|---|")
    for runs in rows.values():
        first = runs[0]
        print(f"| {first['name']} | {first['prompt_tokens']:.0f} | {len(runs)}", end=" | ")
        print(cell(runs, "kl_before"), "→", cell(runs, "kl_after"), end=" | ")
        nothing = "none (the prompt does nothing here)" if "recovered" in first else "–"
        print(cell(runs, "recovered", absent=nothing), end=" | ")
        print(cell(runs, "top1_before"), "→", cell(runs, "top1_after"), end=" | ")
        print(cell(runs, "minutes", digits=1), "|")

if __name__ == "__main__":
    main(sys.argv[1:])
