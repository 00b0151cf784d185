# SPDX-License-Identifier: MIT
"""Tests of the scripts in examples, and of the commands and recipes of the README.

Models are tiny, random and made here. `make test` runs them, after test_bake.py.
"""
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import bake
import evaluate
import finished
import table
import variants
from test_bake import (DEVICE, ROOT, blocks_of, command, examples_of, files_of, folders, loop_kl,
                       make_tokenizer, refused, run, write)

# ------------------------------------------------------------------------------------- evaluate.py
def read_table(text, title):
    """The rows below a title -> {first cell: the others}."""
    lines = text[text.index(title):].split("\n")[2:]
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = cells
    return rows

def number(cell):
    return float(cell.split(" ± ")[0])

@pytest.fixture(scope="session")
def printed(run):
    """What evaluate.py prints on the held-out examples. The run's folder is as it was."""
    out, _ = run
    before = files_of(out)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        evaluate.main([str(out)])
    assert files_of(out) == before
    return text.getvalue()

@pytest.fixture
def baked(run, tmp_path):
    return evaluate.load(run[0], tmp_path)

@pytest.fixture
def held_out(run, baked):
    return evaluate.read_examples(baked, None)

def test_the_tables_are_the_report(run, printed):
    """Before is scale 0, after is scale 1, both with the report's errors."""
    out, report = run
    assert f"## {out}\n" in printed
    rows = read_table(printed, "| 3 questions, ")
    curve = read_table(printed, "| scale |")
    expected = {"KL(prompted ‖ base)": "kl_before", "KL(prompted ‖ baked)": "kl_after",
                "top-1 agreement of prompted and base": "top1_before",
                "top-1 agreement of prompted and baked": "top1_after", "recovered": "recovered"}
    for name, key in expected.items():
        assert rows[name] == [f"{report[key]:.3f} ± {report[key + '_error']:.3f}"]
    assert curve["0"][0] == rows["KL(prompted ‖ base)"][0]
    assert curve["1"][0] == rows["KL(prompted ‖ baked)"][0]
    assert f"{report['held_out_responses']} responses" in printed

def test_the_curve(printed):
    """Its least is one of its scales. The base is as far from the base as it should be: 0."""
    curve = read_table(printed, "| scale |")
    assert [float(scale) for scale in curve] == evaluate.SCALES
    kl = {scale: number(cells[0]) for scale, cells in curve.items()}
    assert kl[re.search(r"is least at scale (\S+)\.\n", printed)[1]] == min(kl.values())
    to_base = [number(cells[1]) for cells in curve.values()]
    assert curve["0"][1] == "0.000 ± 0.000" and to_base == sorted(to_base) and to_base[1] > 0.01

def test_the_least_is_the_least(baked, held_out, monkeypatch):
    """Also where it is not the last scale."""
    def scores(run, examples, scales):
        return {scale: {"q": ((scale - 0.5) ** 2, 1.0), "r": (1.0, 1.0)} for scale in scales}
    monkeypatch.setattr(evaluate, "scores", scores)
    monkeypatch.setattr(evaluate, "answered", lambda run, examples, scale: held_out)
    assert "is least at scale 0.5." in evaluate.measure(baked, held_out)

def test_a_scale_replaces_the_one_before(run, baked, held_out):
    """And each question's KL is the report's."""
    twice = evaluate.scores(baked, held_out, [1.25, 0, 1])
    for row in run[1]["questions"]:
        for scale, side in ((0, "before"), (1, "after")):
            found = twice[scale][row["question"]]
            assert found == pytest.approx([row[f"kl_{side}"], row[f"top1_{side}"]], rel=1e-4)

@pytest.mark.parametrize("scale", [0.5, 1])
def test_every_kl_is_the_plain_loop(baked, held_out, scale):
    """On the baked model's own samples, off topic and prompted: sample by sample, without cache."""
    mixed = [evaluate.off_topic(baked, e) for e in held_out]
    prompted = [evaluate.replace(e, student_prompt=e.teacher_prompt) for e in held_out]
    for examples in (evaluate.answered(baked, held_out, 1), evaluate.answered(baked, mixed, 0),
                     prompted):
        found = evaluate.scores(baked, examples, [scale])[scale]
        with torch.no_grad(), evaluate.rescale_adapter_scale(baked.model, scale):
            kl = loop_kl(baked.model, examples).tolist()
        for question, (value, _) in found.items():
            alike = [x for x, e in zip(kl, examples) if e.question == question]
            assert value == pytest.approx(np.mean(alike), abs=1e-5) and value > 1e-3

def test_a_fresh_adapter_changes_nothing(baked, held_out):
    """Prompted or off topic, its KL to what the model was before is 0, and it recovers nothing."""
    for name, param in baked.model.named_parameters():
        if "lora_B.baked" in name:
            torch.nn.init.zeros_(param)
    text = evaluate.measure(baked, held_out)
    rows = read_table(text, "| 3 questions, ")
    assert rows["KL(prompted ‖ baked and prompted)"] == ["0.000 ± 0.000"]
    assert rows["KL(base ‖ baked) off topic"] == ["0.000 ± 0.000"]
    assert rows["recovered"] == ["0.000 ± 0.000"]
    assert number(rows["KL(base ‖ prompted) off topic"][0]) > 0.01
    assert rows["KL(prompted ‖ base)"] == rows["KL(prompted ‖ baked)"]

def test_what_is_measured_on_what(baked, held_out, monkeypatch):
    """The prompts of both sides, the scale and the responses of each row after before and after."""
    said = {1: [1, 2, 3], 0: [7, 8]}  # by the baked model, by the base
    calls = {}
    scores = evaluate.scores

    def answered(run, examples, scale):
        return [evaluate.replace(e, response=said[scale]) for e in examples]

    def recorded(run, examples, scales):
        found = scores(run, examples, scales)
        calls[evaluate.mean(found[scales[-1]])] = scales, examples
        return found

    monkeypatch.setattr(evaluate, "answered", answered)
    monkeypatch.setattr(evaluate, "scores", recorded)
    rows = read_table(evaluate.measure(baked, held_out), "| 3 questions, ")
    prompt = held_out[0].messages[0]["content"]
    other = evaluate.OTHER
    expected = {  # row: scale, response, the teacher's system message, the student's
        "KL(prompted ‖ baked and prompted)": (1, None, prompt, prompt),
        "KL(prompted ‖ baked) on the baked model's samples": (1, said[1], prompt, None),
        "KL(base ‖ baked) off topic": (1, said[0], other, other),
        "KL(base ‖ prompted) off topic": (0, said[0], other, f"{prompt}\n\n{other}")}
    for name, (scale, response, *systems) in expected.items():
        scales, examples = calls[rows[name][0]]
        assert scales == [scale] and len(examples) == len(held_out)
        for example, old in zip(examples, held_out):
            assert example.response == (response or old.response)
            for ids, system in zip((example.teacher_prompt, example.student_prompt), systems):
                start = f"<|system|>{system}<|end|>" if system else ""
                text = f"{start}<|user|>{old.question}<|end|><|assistant|>"
                assert baked.chat.tokenizer.decode(ids) == text
    assert rows["tokens of a response, baked"] == ["3.000 ± 0.000"]
    assert rows["tokens of a response, prompted (or given)"] == [evaluate.mean_length(held_out)]

def test_the_same_samples_each_time(baked, held_out):
    said = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        said.append([e.response for e in evaluate.answered(baked, held_out, 1)])
    assert said[0] == said[1]

def test_who_answers(baked, held_out, monkeypatch):
    """The student, at the scale that is asked for, from its own prompt, at temperature 1."""
    calls = []

    def generate(model, chat, prompts, prefix, most, temperature):
        layers = [x for x in model.modules() if isinstance(x, peft.tuners.lora.LoraLayer)]
        calls.append((prompts, layers[0].scaling["baked"] * 16 / 32, most, temperature))
        return [[len(calls), i] for i in range(len(prompts))]

    monkeypatch.setattr(bake, "generate", generate)
    baked.args.batch_size = 2
    for scale in (1, 0):
        calls.clear()
        asked = evaluate.answered(baked, held_out, scale)
        assert sum([prompts for prompts, *_ in calls], []) == [e.student_prompt for e in held_out]
        assert {tuple(rest) for _, *rest in calls} == {(scale, 12, 1.0)}
        assert [e.response for e in asked[:3]] == [[1, 0], [1, 1], [2, 0]]
        assert [e.question for e in asked] == [e.question for e in held_out]
    assert all(e.response != [1, 0] for e in held_out)

def test_a_response_leaves_room_for_the_teacher(baked, held_out):
    baked.chat.limit = max(len(e.teacher_prompt) for e in held_out) + 2
    assert max(len(e.response) for e in evaluate.answered(baked, held_out, 1)) <= 2

def test_means_and_errors_against_numpy():
    values = np.array([0.5, 1.5, 4.0, 0.25])
    questions = {f"q{i}": (value, -value) for i, value in enumerate(values)}
    error = np.std(values, ddof=1) / 2
    assert evaluate.mean(questions) == f"{values.mean():.3f} ± {error:.3f}"
    assert evaluate.mean(questions, 1) == f"{-values.mean():.3f} ± {error:.3f}"
    assert evaluate.mean({"q": (0.5, 1)}) == "0.500"
    assert evaluate.shown(-1e-9, 0.1) == "0.000 ± 0.100"
    assert evaluate.shown(None, None).startswith("none")

def test_lengths_are_means_over_questions():
    examples = []
    for question, length in (("q", 2), ("q", 4), ("r", 9)):
        examples.append(bake.RowExample([], [], [0] * length, where="", messages=[],
                                        question=question))
    assert evaluate.mean_length(examples) == f"6.000 ± {np.std([3, 9], ddof=1) / 2 ** 0.5:.3f}"

def test_other_data(run, baked, tmp_path, capsys):
    """Rows with a response and without, and a question a line: the prompted model answers."""
    out, _ = run
    before = files_of(out)
    baked.args.prompt = "Be a pirate."
    baked.args.temperature = 0
    baked.args.trajectories = 1
    data = tmp_path / "data.txt"
    data.write_text("Why?\nHow so, and when?\n")
    examples = evaluate.read_examples(baked, str(data))
    assert {e.question for e in examples} == {"Why?", "How so, and when?"}
    with bake.teacher_mode(baked.model):
        for e in examples:
            said = bake.generate(baked.model, baked.chat, [e.teacher_prompt], bake.Prefix(), 12, 0)
            assert [e.response] == said
    assert files_of(out) == before

    rows = [{"system": "Be a parrot.", "prompt": "Why?", "completion": "Arr"},
            {"system": "Be a parrot.", "prompt": "Why, indeed?"}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    capsys.readouterr()
    evaluate.main([str(out), str(out), "--data", str(data)])
    printed = capsys.readouterr().out
    assert printed.count("| 2 questions, 3 responses | |") == printed.count("## ") == 2
    assert files_of(out) == before

def test_what_cannot_be_measured_is_refused(run, baked, tmp_path):
    out, _ = run
    refused("args.json", evaluate.main, [str(tmp_path)])
    (tmp_path / "args.json").write_text((out / "args.json").read_text())
    refused("is done", evaluate.main, [str(tmp_path)])
    data = tmp_path / "data.txt"
    data.write_text("Why?\n")
    refused("neither", evaluate.read_examples, baked, str(data))
    baked.folder = tmp_path
    (tmp_path / "trajectories.jsonl").touch()
    refused("--data", evaluate.read_examples, baked, None)  # no examples.jsonl
    assert not (tmp_path / "examples.jsonl").exists()
    assert (tmp_path / "trajectories.jsonl").exists()  # what measures removes nothing

def test_a_run_that_held_nothing_out_needs_data(run, baked, tmp_path):
    lines = []
    for line in (run[0] / "examples.jsonl").read_text().splitlines():
        lines.append(json.dumps(json.loads(line) | {"held_out": False, "response": [5]}))
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    baked.folder = tmp_path
    refused("held nothing out", evaluate.read_examples, baked, None)

# ------------------------------------------------------------------------------------- variants.py
def test_no_change_is_what_bake_does(run, tmp_path, monkeypatch, capsys):
    """The loop is that of bake.py: the same share is recovered. Each change changes it."""
    monkeypatch.setattr(variants, "VARIANTS",
                        {"no change": {}, "half a change": {"lr": 5e-3}, "-": {}})
    folder = shutil.copytree(run[0], tmp_path / "tiny-0")
    before = files_of(folder)
    variants.main([str(folder), str(folder), "--only", "change"])
    assert files_of(folder) == before
    rows = read_table(capsys.readouterr().out, "| change | tiny | more than usual |")
    usual = f"{run[1]['recovered']:.3f}"
    assert rows.keys() == {"as bake.py does it", "no change", "half a change"}
    assert rows["as bake.py does it"] == [usual, ""]
    assert rows["no change"] == [usual, "0.000 ± 0.000"]
    share, more = rows["half a change"]
    assert number(more) == pytest.approx(float(share) - float(usual), abs=2e-3) != 0

def test_rates_and_the_mean_of_weights(run, tmp_path, monkeypatch):
    """B's rate is a multiple of A's; where weights are averaged, it is constant once it has risen.
    With gradients of 0 all weights are alike, and so is their mean."""
    rates = []

    class Recorder(torch.optim.AdamW):
        def step(self):
            rates.append([group["lr"] for group in self.param_groups])
            super().step()

    def train_step(model, head, batch, params, *_):
        for param in params:
            param.grad = torch.zeros_like(param)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    monkeypatch.setattr(bake, "train_step", train_step)
    for change in ({"b_factor": 4.0}, {"average": True}):
        made = finished.load(run[0], tmp_path, **variants.EXTRA | change)
        weights = peft.get_peft_model_state_dict(made.model)
        before = {name: weight.clone() for name, weight in weights.items()}
        variants.train(made, variants.read_epochs(made))
        for name, weight in peft.get_peft_model_state_dict(made.model).items():
            torch.testing.assert_close(weight, before[name])
    steps = len(rates) // 2
    rise = [bake.learning_rate(step, steps, 1e-2, 0.1) for step in range(1, steps + 1)]
    assert rates[:steps] == [[rate, 4 * rate] for rate in rise]
    assert rates[steps:] == [[5e-3, 5e-3]] + [[1e-2, 1e-2]] * (steps - 1)

def test_new_samples_in_each_epoch(run, tmp_path):
    """Of the same questions, on the same sides, and the first epoch's are the run's."""
    made = finished.load(run[0], tmp_path, **variants.EXTRA | {"fresh": True})
    epochs = variants.read_epochs(made)
    texts = [sorted(str(e.response) for e in examples) for examples in epochs]
    assert texts[0] == sorted(str(e.response) for e in examples_of(run[0]))
    assert len(epochs) == len({str(text) for text in texts}) == 4
    assert made.args.seed == 0 and files_of(tmp_path / "epoch-1").keys() == {"trajectories.jsonl"}
    for examples in epochs:
        sides = [sorted((e.where, e.held_out) for e in side) for side in (examples, epochs[0])]
        assert sides[0] == sides[1] and all(len(e.target) == len(e.response) for e in examples)

# ---------------------------------------------------------------------------------------- table.py
def write_run(folder, seed, prompt="Arr.", lr=1e-3, minutes=1, **report):
    """The files of a run that table.py reads. Without numbers it is not done."""
    make_tokenizer().save_pretrained(folder)
    args = {"seed": seed, "split_seed": seed, "out": str(folder), "lr": lr}
    (folder / "args.json").write_text(json.dumps(args))
    row = {"messages": [{"role": "system", "content": prompt}]}
    (folder / "examples.jsonl").write_text(json.dumps(row))
    if report:
        (folder / "report.json").write_text(json.dumps(report | {"prompt": prompt}))
        os.utime(folder / "args.json", (0, 1000))
        os.utime(folder / "report.json", (0, 1000 + 60 * minutes))
    return str(folder)

def scored(before, after, recovered, **more):
    return {"kl_before": before, "kl_after": after, "recovered": recovered, "top1_before": 0.5,
            "top1_after": 0.9} | more

def printed_rows(capsys, folders):
    table.main(folders)
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert all(len(row) == 7 for row in cells)
    return cells

def spread(values, digits=3):
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"

def test_a_row_is_means_over_seeds(capsys, tmp_path):
    runs = [write_run(tmp_path / "my-pirate-10", 10, **scored(1.0, 0.1, 0.9, minutes=2)),
            write_run(tmp_path / "french-0", 0, "En français.", **scored(2.0, 0.1, 0.95)),
            write_run(tmp_path / "my-pirate-1", 1, **scored(1.2, 0.3, 0.75, minutes=4.5)),
            write_run(tmp_path / "my-pirate-12", 12, **scored(1.7, 0.3, 0.8, minutes=3))]
    pirate, french = printed_rows(capsys, runs)
    kl = f"{spread([1.0, 1.2, 1.7])} → {spread([0.1, 0.3, 0.3])}"
    assert pirate == ["my-pirate", "4", "3", kl, spread([0.9, 0.75, 0.8]),
                      "0.500 ± 0.000 → 0.900 ± 0.000", spread([2, 4.5, 3], 1)]
    # A token for each byte.
    assert french == ["french", "13", "1", "2.000 → 0.100", "0.950", "0.500 → 0.900", "1.0"]

def test_runs_that_differ_in_more_than_seeds_have_rows_of_their_own(capsys, tmp_path):
    runs = [write_run(tmp_path / "slow-0", 0, **scored(1.0, 0.1, 0.9)),
            write_run(tmp_path / "fast-0", 0, lr=1e-2, **scored(1.0, 0.2, 0.8))]
    assert [row[0] for row in printed_rows(capsys, runs)] == ["slow", "fast"]

def test_a_prompt_that_does_nothing(capsys, tmp_path):
    runs = [write_run(tmp_path / "idle-0", 0, **scored(0.0002, 0.0001, None)),
            write_run(tmp_path / "idle-1", 1, **scored(0.0002, 0.0001, None))]
    (name, _, count, _, recovered, *_), = printed_rows(capsys, runs)
    assert (name, count) == ("idle", "2")
    assert recovered == "none (the prompt does nothing here)"

def test_a_run_that_held_nothing_out_has_dashes(capsys, tmp_path):
    runs = [write_run(tmp_path / "all-0", 0, minutes=3, notes=[])]
    expected = ["all", "4", "1", "– → –", "–", "– → –", "3.0"]
    assert printed_rows(capsys, runs) == [expected]

def test_a_run_that_is_not_done_is_named(capsys, tmp_path):
    runs = [write_run(tmp_path / "begun-0", 0),
            write_run(tmp_path / "done-0", 0, **scored(1, 0, 1))]
    table.main(runs)
    out, error = capsys.readouterr()
    assert runs[0] in error and runs[1] not in error and error.count("\n") == 1
    assert "begun" not in out and "| done |" in out

def test_a_real_run(run, capsys):
    out, report = run
    (name, tokens, *_, kl, recovered, _, _), = printed_rows(capsys, [str(out)])
    assert name == "b" and recovered == f"{report['recovered']:.3f}"
    prompt = "Answer like a pirate, please: *arr*\n<b>&</b> ```x```"
    assert tokens == str(len(prompt))

# -------------------------------------------------------------------------------------- the README
def test_the_commands_of_the_readme_are_commands():
    """Every line that calls bake.py parses, and the files that it names are there."""
    text = (ROOT / "README.md").read_text().replace("\\\n", "").replace("$SLURM_ARRAY_TASK_ID", "1")
    commands = re.findall(r"^    python bake.py (.*)$", text, re.M)
    for line in commands:
        args = bake.parse_args(shlex.split(line))
        assert (ROOT / args.data).exists()
    assert len(commands) == 4 and (ROOT / "examples/prompts/french.txt").exists()

def execute(block, out, folder):
    """A block of the README, on the run in `out`, with what it writes in `folder`."""
    space = {}
    exec(block.replace("runs/mine", str(out)).replace("runs/", f"{folder}/"), space)
    return space

def test_the_readme_recipes(run, folders, tmp_path, capsys):
    """Loading, merging, a second prompt on the merged model, and half-baking, as they are typed."""
    out, _ = run
    loading = [block for block in blocks_of("") if "generate" in block]
    merge, second, half = blocks_of("Recipes")
    loaded_model = execute(loading[0], out, tmp_path)["model"].to(DEVICE)
    assert capsys.readouterr().out.strip()
    execute(merge, out, tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").to(DEVICE)
    ids = torch.tensor([examples_of(out)[0].student_prompt], device=DEVICE)
    with torch.no_grad():
        baked = loaded_model(input_ids=ids).logits
        assert (merged(input_ids=ids).logits - baked).abs().max() < 1e-4
        halved = execute(half, out, tmp_path)["model"].to(DEVICE)(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(folders()).to(DEVICE)(input_ids=ids).logits
    assert 0 < (halved - base).abs().mean() < (baked - base).abs().mean()
    program, *line = second.replace("runs/", f"{tmp_path}/").split()[1:]
    data = write(tmp_path / "one.jsonl", "\n".join(open(ROOT / line[3]).read().split("\n")[:4]))
    line[3] = data
    report = bake.main([*line, "--max-new-tokens", "4", "--epochs", "1", "--dtype", "float32"])
    assert program == "bake.py" and report["kl_before"] > 0

def test_the_loop_of_the_readme(run, folders, command, tmp_path):
    """As a shell runs it: three runs and their row. Started again, it trains nothing anew."""
    loop = blocks_of("On a cluster")[0]
    flags = "--rank 2 --epochs 1 --trajectories 1 --max-new-tokens 4 --dtype float32 --out"
    data = tmp_path / "questions.txt"
    data.write_text("".join(open(ROOT / "examples/questions.txt").readlines()[:6]))
    for usual, here in (("--model DIR", f"--model {folders()}"), ("--out", flags),
                        ("examples/questions.txt", str(data)), ("python", sys.executable),
                        ("runs/", f"{tmp_path}/")):
        assert usual in loop
        loop = loop.replace(usual, here)
    runs = []
    for _ in range(2):
        done = subprocess.run(["bash", "-ec", loop], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]
        runs.append(done.stdout)
    assert re.search(r"\| french \| \d+ \| 3 \|", runs[0]) and "the teacher reads" in runs[0]
    assert "the teacher reads" not in runs[1] and runs[1].endswith(runs[0][-80:])

def test_the_figure(tmp_path):
    """Where matplotlib is installed: a curve for each adapter."""
    pytest.importorskip("matplotlib")
    import curve
    measured = tmp_path / "measured.md"
    table = ("\n\n| scale | KL(a) | KL(b) |\n|---|---|---|\n"
             "| 0 | 0.4 ± 0.1 | 0 |\n| 1 | 0.1 | 0.3 |\n")
    measured.write_text(f"## runs/pirate-0{table}\n## runs/french-0{table}")
    points = [(0.0, 0.4), (1.0, 0.1)]
    assert curve.read_curves(measured.read_text()) == {"pirate-0": points, "french-0": points}
    curve.main(str(measured), str(tmp_path / "curve.svg"))
    drawn = (tmp_path / "curve.svg").read_text()
    curve.main(str(measured), str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == drawn
    assert "pirate-0" in drawn and "scale of the adapter" in drawn and "nats per token" in drawn
