# SPDX-License-Identifier: MIT
"""Finished runs of bake.py, read back for the scripts beside this file."""
import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bake

def load(folder: Path, scratch: Path, **changes) -> SimpleNamespace:
    """The run in `folder`: its args, with changes, and what they make: model, new adapters, chat."""
    with bake.expect(f"a run of bake.py that is done in {folder}"):
        saved = json.loads((folder / "args.json").read_text())
        args = argparse.Namespace(**saved | changes)
        model, head = bake.load_model(args)
    chat = bake.load_chat(model, args)
    return SimpleNamespace(folder=folder, scratch=scratch, args=args, model=model, head=head,
                           chat=chat)

def read_examples(run, rows: Path, samples: Path) -> list:
    """What the rows became is read in one folder, what was sampled in another; or made there."""
    examples = bake.prepare(rows, run.chat, run.args)
    prefix = bake.exact_prefix(run.model, [e.teacher_prompt for e in examples])
    return bake.sample_responses(run.model, run.chat, examples, prefix, samples, run.args)

def set_targets(run, examples: list):
    """Sets every example.target, in a file of its own."""
    prefix = bake.exact_prefix(run.model, [e.teacher_prompt for e in examples])
    path = run.scratch / f"targets-{len(list(run.scratch.iterdir()))}"
    bake.teacher_targets(run.model, examples, prefix, path, run.args.micro_batch_size)
