#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What helps? Trains finished runs anew, on their own samples, with one thing changed at a time.

    $ python examples/variants.py runs/results/pirate-0 runs/results/json-0 [--only rate]

Prints a Markdown row for each change as soon as it is measured: recovered for each prompt, the mean
over its runs; and how much more than without the change, the mean over all runs ± its standard
error. A run is a folder NAME-SEED that bake.py wrote.
"""
import argparse
import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
import finished
from finished import bake

VARIANTS = {  # what is changed: flags of bake.py, and three that only `train` here knows
    "LoRA+: B learns at 4 × the rate": {"b_factor": 4.0},
    "rank 64, alpha 128": {"rank": 64, "alpha": 128.0},
    "a constant rate, and the mean of the last epoch's weights": {"average": True},
    "new samples in each epoch": {"fresh": True},
    "batches of 4: twice the steps": {"batch_size": 4},
    "half the rate": {"lr": 5e-4},
    "6 epochs: twice the steps": {"epochs": 6},
    "LoRA on MLPs alone": {"target_modules": "gate_proj,up_proj,down_proj"},
    "LoRA on attention alone": {"target_modules": "q_proj,k_proj,v_proj,o_proj"},
}
EXTRA = {"b_factor": 1.0, "average": False, "fresh": False}

def read_epochs(run) -> list:
    """-> for each epoch its examples: the run's own, or others that are sampled now."""
    epochs = [finished.read_examples(run, run.folder, run.folder)] * run.args.epochs
    finished.set_targets(run, epochs[0])
    if run.args.fresh:
        seed = run.args.seed
        for epoch in range(1, run.args.epochs):
            out = run.scratch / f"epoch-{epoch}"
            out.mkdir()
            run.args.seed = seed + 1000 * epoch  # of what is sampled
            epochs[epoch] = finished.read_examples(run, run.folder, out)
            finished.set_targets(run, epochs[epoch])
        run.args.seed = seed
    return epochs

def train(run, epochs: list):
    """The loop of bake.py without its files, and the changes that it has no flag for."""
    model, head, args = run.model, run.head, run.args
    bake.prepare_student(model, args)
    sides = {"lora_A": [], "lora_B": []}
    for name, param in model.named_parameters():
        if param.requires_grad:
            sides["lora_B" if "lora_B" in name else "lora_A"].append(param)
    params = sides["lora_A"] + sides["lora_B"]
    groups = [{"params": sides["lora_A"]}, {"params": sides["lora_B"]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    plan = []
    for epoch, examples in enumerate(epochs):
        trained = [e for e in examples if not e.held_out]
        plan += bake.batches(trained, args.batch_size, args.seed, epoch)
    last_epoch = len(plan) - len(plan) // len(epochs)
    total = [torch.zeros_like(param) for param in params]
    for step, batch in enumerate(tqdm(plan, "training", unit="step", leave=False), 1):
        rate = bake.learning_rate(step, len(plan), args.lr, args.warmup)
        if args.average:
            rate = args.lr * min(1, step / math.ceil(args.warmup * len(plan)))
        bake.train_step(model, head, batch, params, args.micro_batch_size, args.kl_temperature)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.param_groups[1]["lr"] = rate * args.b_factor
        optimizer.step()
        optimizer.zero_grad()
        if args.average and step > last_epoch:
            torch._foreach_add_(total, [param.data for param in params])
    if args.average:
        for param, summed in zip(params, total):
            param.data = summed / (len(plan) - last_epoch)

def recovered(folder: str, change: dict) -> float:
    """Trains with the change -> the share of the prompt's effect that is in the weights."""
    with tempfile.TemporaryDirectory() as scratch:
        run = finished.load(Path(folder), Path(scratch), **EXTRA | change)
        epochs = read_epochs(run)
        held_out = [e for e in epochs[0] if e.held_out]
        before = bake.held_out_scores(run.model, run.head, held_out, run.args)["eval_kl"]
        train(run, epochs)
        after = bake.held_out_scores(run.model, run.head, held_out, run.args)["eval_kl"]
    return 1 - after / before

def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that bake.py wrote")
    parser.add_argument("--only", default="", help="changes with this in their names")
    args = parser.parse_args(argv)
    folders = args.runs
    names = np.array([re.sub(r"-\d+$", "", Path(folder).resolve().name) for folder in folders])
    prompts = sorted(set(names))
    reports = [json.loads((Path(folder) / "report.json").read_text()) for folder in folders]
    usual = np.array([report["recovered"] for report in reports])

    def row(title: str, found: np.ndarray, last: str):
        means = [f"{found[names == prompt].mean():.3f}" for prompt in prompts]
        print("|", " | ".join([title, *means, last]), "|", flush=True)

    print("|", " | ".join(["change", *prompts, "more than usual"]), "|")
    print("|---" * (len(prompts) + 2) + "|")
    row("as bake.py does it", usual, "")
    for title, change in VARIANTS.items():
        if args.only not in title:
            continue
        found = np.array([recovered(folder, change) for folder in folders])
        more = found - usual
        row(title, found, evaluate.shown(more.mean(), bake.standard_error(more)))

if __name__ == "__main__":
    main()
