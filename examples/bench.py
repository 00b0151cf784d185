#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures bake.py: its time and memory, beside those of the usual ways to do the same.

    $ python examples/bench.py               # all sections: some 20 minutes on 2 cores
    $ python examples/bench.py steps demo    # some of: rows steps demo loss sampling run
    $ python examples/bench.py --quick       # tiny sizes: whether it works, not how fast it is

On a CPU the model is the demo's, in fp32; on CUDA it has the shape of Qwen3-0.6B, random weights,
and bf16. The ways of a section take turns in one process, with the same tokens and LoRA.
"""
import argparse
import collections
import functools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import tokenizers
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import bake

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = SimpleNamespace(
    rounds=5, rows=[5_000, 20_000],
    prompts=[64, 512, 2048], batch=4, question=20, response=64,  # steps
    demo_batches=[2, 4, 8, 16], demo_response=48,
    loss=[2048, 8192], chunk=128,
    sampled=32, long_prompt=512, run_rows=16)
CUDA_SIZES = {"prompts": [64, 1000, 4000], "batch": 16, "question": 50, "response": 150,
              "demo_batches": [8, 16, 32, 64]}
QUICK_SIZES = {"rounds": 1, "rows": [100, 200], "prompts": [32], "batch": 2, "question": 4,
               "response": 4, "demo_batches": [2], "demo_response": 4, "loss": [128, 512],
               "chunk": 8, "sampled": 4, "long_prompt": 32, "run_rows": 4}

# ----------------------------------------------------------------------------- models and examples
TURNS = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}")
DEFAULT_SYSTEM = ("{% if messages[0].role != 'system' %}<|system|>You are a helpful assistant."
                  "<|end|>{% endif %}")

def save_random_model(folder: Path, config, template: str):
    """Random weights, and a tokenizer with a token for each byte."""
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + special
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = transformers.GPT2Tokenizer(
        vocabulary, [], eos_token="<|end|>", pad_token="<|pad|>", bos_token=None, unk_token=None,
        extra_special_tokens=special, chat_template=template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)

@functools.cache
def load_bench_model(folder: Path) -> tuple:
    """-> model, head and arguments."""
    path = ROOT / "models" / "SmolLM2-135M-Instruct"
    if DEVICE == "cuda":
        path = folder / "qwen"
        config = transformers.Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, tie_word_embeddings=True, dtype="bfloat16")
        save_random_model(path, config, DEFAULT_SYSTEM + TURNS)
    args = bake.parse_args(["--model", str(path), "--data", str(ROOT / "examples/pirate.jsonl")])
    return *bake.load_model(args), args

def read_examples(model, args) -> list:
    """The examples of --data."""
    return bake.build_examples(bake.read_rows(args.data), bake.load_chat(model, args), args)

def make_examples(count: int, prompt: int, response: int) -> list:
    """Examples of random ids below 256: a prompt that all share, then each its own."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, prompt).tolist()
    examples = []
    for _ in range(count):
        question = rng.integers(0, 256, SIZES.question).tolist()
        said = rng.integers(0, 256, response).tolist()
        examples.append(bake.Example(shared + question, question, said))
    return examples

def teacher_prefix(model, examples: list) -> bake.Prefix:
    """What the teacher prompts start with."""
    with bake.teacher_mode(model):
        return bake.shared_prefix(model, [e.teacher_prompt for e in examples])

def lora(model) -> list:
    """The parameters that are trained."""
    return [p for p in model.parameters() if p.requires_grad]

# --------------------------------------------------------------------------------- time and memory
def seconds(rounds: int, **calls) -> dict:
    """Calls by name -> the median time of each. They take turns: a slow moment hits them all."""
    times = collections.defaultdict(list)
    synchronize = torch.get_device_module(DEVICE).synchronize
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(taken)) for name, taken in times.items()}

def peak_memory(call) -> float:
    """MB allocated at the highest moment of a call, above those before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(np.cumsum(changes).max(), 0) / 2 ** 20

def process_memory(key: str) -> float:
    """MB of this process, as Linux counts them."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(key + r":\s+(\d+)", status)[1]) / 1024

# ------------------------------------------------- ways to form the gradient; each returns its loss
def usual_logits(model, head, examples: list, side: str) -> torch.Tensor:
    """(B, R, V) logits that predict the response, cut out of those of all positions."""
    ids = torch.tensor([getattr(e, side) + e.response for e in examples], device=DEVICE)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits[:, -len(examples[0].response) - 1:-1]

def response_logits(model, head, examples: list, side: str) -> torch.Tensor:
    """The same, where no other position meets the head."""
    prompts = [getattr(e, side) for e in examples]
    states = bake.response_states(model, prompts, [e.response for e in examples], bake.Prefix())
    return head(pad_sequence(states, batch_first=True))

@torch.no_grad()
def oracle(model, examples: list) -> float:
    """The definition, sample by sample."""
    values = []
    for example in examples:
        with model.disable_adapter():
            log_p = usual_logits(model, None, [example], "teacher_prompt").float().log_softmax(-1)
        log_q = usual_logits(model, None, [example], "student_prompt").float().log_softmax(-1)
        values.append((log_p.exp() * (log_p - log_q)).sum(-1).mean().item())
    return float(np.mean(values))

def dense_step(model, head, examples: list, share: float = 1.0, logits=response_logits):
    """One padded batch, all logits of both sides at once, the teacher run again."""
    with bake.teacher_mode(model):
        teacher = logits(model, head, examples, "teacher_prompt")
    real = [torch.ones(len(e.response), device=DEVICE) for e in examples]
    mask = pad_sequence(real, batch_first=True)
    kl = bake.token_kl(logits(model, head, examples, "student_prompt"), teacher) * mask
    loss = share * (kl.sum(1) / mask.sum(1)).mean()
    loss.backward()
    return loss.detach()

def loop_step(model, head, examples: list):
    """The same, sample by sample."""
    return sum(dense_step(model, head, [example], 1 / len(examples)) for example in examples)

def bake_step(model, head, examples: list, sharing=bake.student_prefix):
    """bake.py's, with the teacher's states at hand."""
    with mock.patch.object(bake, "student_prefix", sharing):
        return bake.train_step(model, head, examples, lora(model), len(examples))[0]

def first_epoch_step(model, head, examples: list, prefix: bake.Prefix, path: Path):
    """bake.py's, with the teacher's part in it."""
    bake.teacher_targets(model, examples, prefix, path, len(examples))
    return bake_step(model, head, examples)

def uncached_step(model, head, examples: list):
    """bake.py's, for a student that reads every prompt in full."""
    with mock.patch.object(model.config.get_text_config(), "use_cache", False):
        return bake_step(model, head, examples)

def sft_step(model, examples: list):
    """Plain fine-tuning on what the student reads, with labels on the response alone."""
    ids = [torch.tensor(e.student_prompt + e.response) for e in examples]
    labels = [row.clone() for row in ids]
    for label, example in zip(labels, examples):
        label[:len(example.student_prompt)] = -100
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    ids = pad_sequence(ids, batch_first=True)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    loss = model(input_ids=ids.to(DEVICE), attention_mask=mask.to(DEVICE),
                 labels=labels.to(DEVICE), use_cache=False).loss
    loss.backward()
    return loss.detach()

def checked_steps(model, examples: list, **ways) -> dict:
    """Ways by name -> whole steps, of rate 0. All of them but sft have the loss of the oracle."""
    optimizer = torch.optim.AdamW(lora(model), lr=0.0)

    def step(way):
        loss = way()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    steps = {name: functools.partial(step, way) for name, way in ways.items()}
    right = oracle(model, examples)
    for name, call in steps.items():
        found = float(call())
        close = abs(found - right) < (1e-5 if DEVICE == "cpu" else 1e-2)
        assert close or name == "sft", f"{name}: expected a loss of {right}, found {found}"
    return steps

# ---------------------------------------------------------------------------------------- sections
def measure_rows(folder: Path):
    """Many rows, a tiny model: what reading takes, and whether steps slow down among them."""
    tiny = transformers.LlamaConfig(
        vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64, max_position_embeddings=512)
    save_random_model(folder / "tiny", tiny, TURNS)
    data = folder / "many.jsonl"
    args = bake.parse_args(["--model", str(folder / "tiny"), "--data", str(data), "--rank", "4",
                            "--dtype", "float32", "--prompt", "Be brief. " * 20])
    for count in SIZES.rows:
        rows = [{"prompt": f"Question {i}?", "completion": "word " * 40} for i in range(count)]
        data.write_text("\n".join(json.dumps(row) for row in rows))
        del rows
        model, head = bake.load_model(args)
        start = time.perf_counter()
        examples = read_examples(model, args)
        loading = time.perf_counter() - start
        memory = [process_memory("RssAnon")]
        prefix = teacher_prefix(model, examples)
        bake.teacher_targets(model, examples, prefix, folder / "targets", 32)
        memory.append(process_memory("RssAnon"))
        times = []
        for batch in bake.batches(examples, 32, seed=0, epoch=0):
            times += seconds(1, step=lambda: bake_step(model, head, batch)).values()
            model.zero_grad()
        memory.append(process_memory("RssAnon"))
        first, _, last = [1000 * np.median(third) for third in np.array_split(times, 3)]
        print(f"{count} rows: read in {loading:.1f} s, {1e6 * loading / count:.0f} us each")
        print(f"  private MB: {memory[0]:.0f}, after the targets {memory[1]:.0f}, after training "
              f"{memory[2]:.0f}; peak with mapped files {process_memory('VmHWM'):.0f}")
        print(f"  ms a step: {first:.1f} in the first third, {last:.1f} in the last")

def measure_steps(folder: Path):
    """Steps in all ways, behind prompts of several lengths."""
    model, head, _ = load_bench_model(folder)
    print(f"batch {SIZES.batch}, question {SIZES.question}, response {SIZES.response} tokens")
    print("prompt way           s/step tokens/s  x sft x dense  peak MB")
    path = folder / "targets"
    later = []
    for length in SIZES.prompts:
        examples = make_examples(SIZES.batch, length, SIZES.response)
        prefix = teacher_prefix(model, examples)
        steps = checked_steps(
            model, examples,
            loop=lambda: loop_step(model, head, examples),
            usual=lambda: dense_step(model, head, examples, logits=usual_logits),
            dense=lambda: dense_step(model, head, examples),
            first_epoch=lambda: first_epoch_step(model, head, examples, prefix, path),
            later_epochs=lambda: bake_step(model, head, examples),
            sft=lambda: sft_step(model, examples))
        times = seconds(SIZES.rounds if length < 2000 else 3, **steps)
        later.append(times["later_epochs"])
        for name, taken in times.items():
            speed = SIZES.batch * SIZES.response / taken
            print(f"{length:6} {name:12}{taken:8.3f}{speed:9.0f}{taken / times['sft']:7.2f}"
                  f"{taken / times['dense']:8.3f}{peak_memory(steps[name]):9.0f}")
    print(f"later epochs, longest prompt / shortest: {later[-1] / later[0]:.2f}")
    if DEVICE == "cuda":
        # A step waits for nothing: it would raise here.
        torch.cuda.set_sync_debug_mode("error")
        bake_step(model, head, examples)
        torch.cuda.set_sync_debug_mode("default")

def measure_demo(folder: Path):
    """Steps on the demo's tokens. The student's prefix saves tokens: common x (batch - 1)."""
    model, head, args = load_bench_model(folder)
    examples = read_examples(model, args)
    rng = np.random.default_rng(0)
    for example in examples:
        example.response = rng.integers(0, 256, SIZES.demo_response).tolist()
    print("batch saved way             s/step  x sft")
    for size in SIZES.demo_batches:
        groups = bake.by_length(examples, size)
        batch = groups[len(groups) // 2]
        prompts = [e.student_prompt for e in batch]
        saved = len(os.path.commonprefix(prompts)) * (size - 1)
        bake.teacher_targets(model, batch, bake.Prefix(), folder / "targets", size)
        steps = checked_steps(
            model, batch,
            with_prefix=lambda: bake_step(model, head, batch, sharing=bake.shared_prefix),
            without_prefix=lambda: uncached_step(model, head, batch),
            sft=lambda: sft_step(model, batch))
        times = seconds(SIZES.rounds, **steps)
        for name, taken in times.items():
            print(f"{size:5}{saved:6} {name:14}{taken:8.3f}{taken / times['sft']:7.2f}")
        ratio = times["with_prefix"] / times["without_prefix"]
        print(f"{size:5}{saved:6} with_prefix / without_prefix: {ratio:.2f}")

def dense_loss(student, teacher, mask, head) -> torch.Tensor:
    """The loss with all logits at once."""
    return bake.token_kl(head(student), head(teacher))

def loss_peak(folder: Path, tokens: int, loss) -> float:
    """MB that a loss of so many tokens takes, with its gradient."""
    model, head, _ = load_bench_model(folder)
    width = model.get_output_embeddings().weight.shape[1]
    student = torch.randn(8, tokens // 8, width, device=DEVICE, dtype=model.dtype)
    student.requires_grad_()
    teacher = student.detach() + 1
    mask = torch.ones(8, tokens // 8, dtype=torch.bool)
    return peak_memory(lambda: loss(student, teacher, mask, head).sum().backward())

def measure_loss(folder: Path):
    """Memory of the loss alone: a tenth of the dense one's, and it grows by the gradient alone."""
    few, many = SIZES.loss
    chunked = functools.partial(bake.batched_kl, chunk=SIZES.chunk)
    small = loss_peak(folder, few, chunked)
    large = loss_peak(folder, many, chunked)
    full = loss_peak(folder, few, dense_loss)
    print(f"MB, {few} tokens: {small:.0f}, dense {full:.0f}, {small / full:.1%}; {many} tokens: "
          f"{large:.0f}")
    model = load_bench_model(folder)[0]
    gradient = many * model.get_output_embeddings().weight.shape[1] * model.dtype.itemsize
    assert small <= 0.1 * full
    assert large - small <= gradient / 2 ** 20

def measure_sampling(folder: Path):
    """Four responses to each question: in one call behind the prefix, and one by one."""
    model, _, args = load_bench_model(folder)
    chat = bake.load_chat(model, args)
    chat.stops = [chat.vocab - 1]  # next to never sampled: all responses have full length
    examples = make_examples(SIZES.run_rows // 2, SIZES.long_prompt, response=1)
    prompts = [e.teacher_prompt for e in examples for _ in range(4)]
    prefix = teacher_prefix(model, examples)
    sample = functools.partial(bake.generate, model, chat, most=SIZES.sampled, temperature=1.0)
    with bake.teacher_mode(model):
        times = seconds(1, alone=lambda: [sample([p], bake.Prefix()) for p in prompts],
                        batched=lambda: sample(prompts, prefix))
    tokens = len(prompts) * SIZES.sampled
    print(f"tokens/s: {tokens / times['alone']:.0f} alone, {tokens / times['batched']:.0f} in one: "
          f"{times['alone'] / times['batched']:.1f} x")

def dense_run(args):
    """Epochs of dense steps, from loading the model on."""
    model, head = bake.load_model(args)
    examples = read_examples(model, args)
    optimizer = torch.optim.AdamW(lora(model), lr=args.lr)
    for epoch in range(args.epochs):
        for batch in bake.batches(examples, args.batch_size, args.seed, epoch):
            dense_step(model, head, batch)
            optimizer.step()
            optimizer.zero_grad()

def measure_run(folder: Path):
    """Three epochs: all that bake.py does, and loading the model and dense steps alone."""
    args = load_bench_model(folder)[2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)

    def text(start: str, tokens: int) -> str:
        return tokenizer.decode(tokenizer(start + " and so on" * 600).input_ids[:tokens])

    rows = []
    said = SIZES.response - 1
    for i in range(SIZES.run_rows):
        rows.append({"prompt": text(f"Question {i}:", 12), "response": text(f"Answer {i}:", said)})
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--model", args.model, "--data", str(data), "--out", str(folder / "out"),
             "--prompt", text("Answer", SIZES.long_prompt), "--batch-size", "4",
             "--eval-fraction", "0", "--max-new-tokens", "1"]
    times = seconds(1, dense=lambda: dense_run(bake.parse_args(flags)),
                    bake=lambda: bake.main(flags))
    print(f"dense {times['dense']:.1f} s, bake.py {times['bake']:.1f} s: "
          f"{times['dense'] / times['bake']:.1f} x")

# The rows come first: the others leave a large heap behind.
SECTIONS = {"rows": measure_rows, "steps": measure_steps, "demo": measure_demo,
            "loss": measure_loss, "sampling": measure_sampling, "run": measure_run}

def main():
    """Runs the sections that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    args = parser.parse_args()
    if not set(args.sections) <= set(SECTIONS):
        parser.error(f"expected sections of {', '.join(SECTIONS)}")
    if DEVICE == "cuda":
        vars(SIZES).update(CUDA_SIZES)
    if args.quick:
        vars(SIZES).update(QUICK_SIZES)
    transformers.utils.logging.disable_progress_bar()
    os.environ["KINETO_LOG_LEVEL"] = "99"
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else torch.get_num_threads()
    print(f"{torch.__version__=} {transformers.__version__=} {device=}")
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in SECTIONS.items():
            if name in (args.sections or SECTIONS):
                print(f"\n{name}: {measure.__doc__}", flush=True)
                measure(Path(folder))

if __name__ == "__main__":
    main()
