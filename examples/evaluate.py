#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures baked adapters, without training: on what their runs held out, or on other data.

    $ python examples/evaluate.py runs/pirate runs/french [--data unseen.jsonl] > measured.md

The arguments of an adapter's run hold for --data too. Means are over questions, ± their standard
error; KL is in nats a token. New responses of a base or baked model are sampled at temperature 1.
"""
import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from peft.helpers import rescale_adapter_scale

import finished
from finished import bake

SCALES = [0, 0.25, 0.5, 0.75, 1, 1.25]  # of the trained update: at 0 the model is the base
OTHER = "You are a careful translator."  # the system message off topic

def load(folder: Path, scratch: Path):
    """The run in `folder`, with its adapter."""
    run = finished.load(folder, scratch)
    with bake.expect(f"a run of bake.py that is done in {folder}"):
        run.model.load_adapter(folder, "baked")
        run.model.set_adapter("baked")
    return run

def read_examples(run, data: str | None) -> list:
    """The examples of `data`, answered by the prompted model, or those that the run held out."""
    run.args.data = data
    out = run.scratch if data else run.folder
    examples = finished.read_examples(run, out, out)
    examples = [e for e in examples if data or e.held_out]
    if not examples:
        raise bake.Refused(f"expected --data, as the run in {run.folder} held nothing out")
    return examples

def scores(run, examples: list, scales: list) -> dict:
    """-> scale of the student: {question: (KL(teacher ‖ student), top-1 agreement)}."""
    finished.set_targets(run, examples)
    found = {}
    for scale in scales:
        with rescale_adapter_scale(run.model, scale):
            held_out = bake.held_out_scores(run.model, run.head, examples, run.args)
            found[scale] = held_out["questions"]
    return found

def answered(run, examples: list, scale: float) -> list:
    """-> the examples, each with a new response that the student samples at `scale`."""
    longest = max(len(e.teacher_prompt) for e in examples)  # the teacher reads the response too
    most = min(run.args.max_new_tokens, run.chat.limit - longest)
    prompts = [e.student_prompt for e in examples]
    said = []
    with rescale_adapter_scale(run.model, scale):
        prefix = bake.sampling_prefix(run.model, prompts, bake.Prefix())
        torch.manual_seed(run.args.seed)
        for i in range(0, len(prompts), run.args.batch_size):
            batch = prompts[i:i + run.args.batch_size]
            said += bake.generate(run.model, run.chat, batch, prefix, most, 1.0)
    return [replace(e, response=ids) for e, ids in zip(examples, said)]

def off_topic(run, example: bake.RowExample) -> bake.RowExample:
    """The same turns behind OTHER. The teacher reads the prompt before it; no response yet."""
    prompt, *turns = example.messages
    both = {"role": "system", "content": f"{prompt['content']}\n\n{OTHER}"}
    args = argparse.Namespace(prompt="", student_prompt=OTHER)
    return bake.build_example(example.where, [both, *turns], None, None, run.chat, args)

def shown(mean: float | None, error: float | None) -> str:
    if mean is None:
        return "none (the prompt does nothing here)"
    return f"{mean:z.3f}" if error is None else f"{mean:z.3f} ± {error:.3f}"

def mean(questions: dict, column: int = 0) -> str:
    """{question: its values} -> the mean of one of the values."""
    values = np.array(list(questions.values()))[:, column]
    return shown(values.mean(), bake.standard_error(values))

def mean_length(examples: list) -> str:
    """Of the responses, in tokens."""
    lengths = {}
    for example in examples:
        lengths.setdefault(example.question, []).append(len(example.response))
    return mean({question: [np.mean(group)] for question, group in lengths.items()})

def measure(run, examples: list) -> str:
    """-> two tables in Markdown: what is measured, and the adapter scaled."""
    plain = [replace(e, teacher_prompt=e.student_prompt) for e in examples]
    both = [replace(e, student_prompt=e.teacher_prompt) for e in examples]
    own = answered(run, examples, 1)
    # Off topic the base answers. It is the teacher, and so p in KL(p ‖ q), of both rows.
    mixed = answered(run, [off_topic(run, e) for e in examples], 0)
    alone = [replace(e, teacher_prompt=e.student_prompt) for e in mixed]
    caused = [replace(a, student_prompt=m.teacher_prompt) for a, m in zip(alone, mixed)]

    to_prompted = scores(run, examples, SCALES)
    to_base = scores(run, plain, SCALES)
    report = bake.held_out_numbers(to_prompted[0], to_prompted[1])
    rows = {
        "KL(prompted ‖ base)": mean(to_prompted[0]),
        "KL(prompted ‖ baked)": mean(to_prompted[1]),
        "recovered": shown(report["recovered"], report["recovered_error"]),
        "top-1 agreement of prompted and base": mean(to_prompted[0], 1),
        "top-1 agreement of prompted and baked": mean(to_prompted[1], 1),
        "KL(prompted ‖ baked and prompted)": mean(scores(run, both, [1])[1]),
        "KL(prompted ‖ baked) on the baked model's samples": mean(scores(run, own, [1])[1]),
        "KL(base ‖ baked) off topic": mean(scores(run, alone, [1])[1]),
        "KL(base ‖ prompted) off topic": mean(scores(run, caused, [0])[0]),
        "tokens of a response, prompted (or given)": mean_length(examples),
        "tokens of a response, baked": mean_length(own),
    }
    lines = [f"| {len(report['questions'])} questions, {len(examples)} responses | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]

    lines += ["", "| scale | KL(prompted ‖ scaled) | KL(base ‖ scaled) |", "|---|---|---|"]
    for scale in SCALES:
        lines.append(f"| {scale} | {mean(to_prompted[scale])} | {mean(to_base[scale])} |")
    means = [np.mean([kl for kl, _ in to_prompted[scale].values()]) for scale in SCALES]
    least = SCALES[np.argmin(means)]
    return "\n".join([*lines, "", f"KL(prompted ‖ scaled) is least at scale {least}."])

def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("adapters", nargs="+", metavar="ADAPTER", help="folder that bake.py wrote")
    parser.add_argument("--data", help=".jsonl or .txt; default: what the adapter's run held out")
    args = parser.parse_args(argv)
    for folder in args.adapters:
        print(f"## {folder}\n")
        with tempfile.TemporaryDirectory() as scratch:
            run = load(Path(folder), Path(scratch))
            print(measure(run, read_examples(run, args.data)) + "\n")

if __name__ == "__main__":
    main()
