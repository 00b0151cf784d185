"""Tests of bake.py, each named after a law it holds. `make test` runs them, on CUDA if there is one.

Structure (lengths, batches, chunks, order) is drawn by Hypothesis; tensors come from seeded
generators. Models are tiny, random and made here, and so is their byte-level tokenizer: no network.
"""
import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import bake
from bake import Example

settings.register_profile("bake", deadline=None, derandomize=True, max_examples=40,
                          suppress_health_check=list(HealthCheck))
settings.load_profile("bake")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ----------------------------------------------------------------------- tiny models, made here

CHATML = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]

def make_tokenizer(template=CHATML, pad="<|pad|>"):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad)
    fast.chat_template = template
    return fast

SIZE = dict(vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=512, pad_token_id=260, eos_token_id=256,
            bos_token_id=None)
KV = dict(num_key_value_heads=2)
FAMILIES = {
    "Llama": KV, "Qwen2": KV, "Qwen3": KV | dict(head_dim=8), "OPT": dict(ffn_dim=64, word_embed_proj_dim=16),
    "GPT2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=512), "GPTNeoX": {},
    "Gemma2": KV | dict(head_dim=8, final_logit_softcapping=3.0, sliding_window=8, layer_types=[
        "sliding_attention", "full_attention"]),
    "Cohere": KV | dict(logit_scale=0.5), "Granite": KV | dict(logits_scaling=0.5),
    "Mistral": KV | dict(sliding_window=8),
    "Rwkv": dict(attention_hidden_size=32, context_length=512),
    "Mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1, expand=2, chunk_size=8),
}

def make_model(folder, family="Llama", template=CHATML, **config):
    """A random model, scaled up until what it predicts is far from uniform, with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE | FAMILIES[family] | config)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.mul_(4)
    model.save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return str(folder)

@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """folders(family) -> the folder of a tiny model of it."""
    made = {}

    def get(family="Llama"):
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), family)
        return made[family]
    return get

def parse(model, *flags, data="none.txt"):
    return bake.parse_args(["--model", str(model), "--data", str(data), "--dtype", "float32",
                            "--rank", "4", *map(str, flags)])

def loaded(args, seed=0, dtype=None):
    """A model whose adapters do something: B is not zero."""
    model, head = bake.load_model(args)
    if dtype:
        model, args.dtype = model.to(dtype), str(dtype).split(".")[1]
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    return model, head

def make_examples(sizes, seed=0, shared=6):
    """[(teacher extra, student, response)] lengths -> examples of random ids, alike at the start."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 256, shared).tolist()
    return [Example(f"row {i}", [{"role": "user", "content": f"question {i}"}],
                    start + rng.integers(0, 256, u + x).tolist(), rng.integers(0, 256, x).tolist(),
                    rng.integers(0, 256, y).tolist())
            for i, (u, x, y) in enumerate(sizes)]

def loop_kl(model, examples, temperature=1.0):
    """The reference: sample by sample, no padding, no cache, full logits, teacher run again."""
    losses = []
    for e in examples:
        sides = {}
        for side in ("teacher", "student"):
            prompt = getattr(e, side)
            ids = torch.tensor([prompt + e.response], device=model.device)
            if side == "teacher":
                with torch.no_grad(), model.disable_adapter():
                    logits = model(input_ids=ids, use_cache=False).logits
            else:
                logits = model(input_ids=ids, use_cache=False).logits
            sides[side] = logits[0, len(prompt) - 1:-1]
        p, q = (F.log_softmax(sides[s] / temperature, -1) for s in ("teacher", "student"))
        losses.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean())
    return torch.stack(losses)

def lora_grads(model):
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads

def targets_for(model, examples, args, folder, prefix=None):
    prefix = bake.shared_prefix(model, examples) if prefix is None else prefix
    path = Path(folder) / "targets"
    path.unlink(missing_ok=True)
    return bake.teacher_targets(model, examples, prefix, path, args)

# --------------------------------------------------------------------------------- the loss

def numpy_kl(p_logits, q_logits):
    """KL(p ‖ q) written once more, in numpy and fp64."""
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (np.float64(p_logits), np.float64(q_logits)))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)

@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), chunk=st.integers(1, 60),
       temperature=st.sampled_from([0.5, 1.0, 2.0]), dtype=st.sampled_from([torch.float32, torch.float64]),
       seed=st.integers(0, 10 ** 6))
@example(lengths=[0, 0], chunk=3, temperature=1.0, dtype=torch.float64, seed=0)
@settings(max_examples=150)
def test_law_3_batched_kl_is_the_per_sample_loop(lengths, chunk, temperature, dtype, seed):
    """Any batch, lengths, padding and chunk: the same loss and gradient as one sample at a
    time. Padded rows hold NaN, so one that reached the head would spoil everything."""
    B, R, D, V = len(lengths), max(lengths) + 2, 8, 23
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(B, R, dtype=torch.bool)
    for b, n in enumerate(lengths):  # real tokens anywhere in the row, not just at its start
        mask[b, torch.randperm(R, generator=g)[:n]] = True
    W = torch.randn(V, D, generator=g, dtype=dtype).to(DEVICE)
    student, teacher = (torch.randn(B, R, D, generator=g, dtype=dtype).masked_fill(
        ~mask[..., None], math.nan).to(DEVICE) for _ in range(2))
    head = lambda h: 3 * torch.tanh(h @ W.T / 3)
    weights = torch.rand(B, generator=g, dtype=dtype).to(DEVICE)
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()

    ours = bake.batched_kl(a, teacher, mask.to(DEVICE), head, temperature, chunk)
    (ours * weights).sum().backward()
    loop = []
    for s, t, m in zip(b, teacher, mask):
        q, p = (F.log_softmax(head(x[m]) / temperature, -1) for x in (s, t))
        loop.append((p.exp() * (p - q)).sum() / max(int(m.sum()), 1))
    (torch.stack(loop) * weights).sum().backward()

    tight = 1e-9 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours, torch.stack(loop), atol=tight, rtol=tight)
    real = mask.to(DEVICE)
    torch.testing.assert_close(a.grad[real], b.grad[real], atol=tight, rtol=tight)
    assert (a.grad[~real] == 0).all()

@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1,
                      max_size=5), chunk=st.integers(1, 20), order=st.randoms(use_true_random=False))
def test_law_3_lora_gradients_are_those_of_the_loop(llama64, sizes, chunk, order, tmp_path_factory):
    """Through the network, prefix cache and targets file, in fp64: the LoRA gradients of a padded
    batch are those of the loop over unpadded sequences."""
    model, head, args = llama64
    examples = make_examples(sizes, seed=len(sizes))
    targets = targets_for(model, examples, args, tmp_path_factory.getbasetemp())
    order.shuffle(examples)
    ours = bake.batched_kl(*bake.both_states(model, examples, targets), head, chunk=chunk)
    ours.mean().backward()
    grads = lora_grads(model)
    loop = loop_kl(model, examples)
    loop.mean().backward()
    torch.testing.assert_close(ours, loop, atol=1e-9, rtol=1e-9)
    expected = lora_grads(model)
    assert grads.keys() == expected.keys() and len(grads) == 2 * 7 * 2  # A and B, 7 layers, twice
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name], atol=1e-9, rtol=1e-7)

@pytest.fixture(scope="session")
def llama64(folders):
    args = parse(folders())
    return *loaded(args, dtype=torch.float64), args

@pytest.mark.parametrize("p, q, expected", [((.9, .1), (.5, .5), .3681), ((.5, .5), (.9, .1), .5108),
                                            ((.2, .8), (.2, .8), 0)])
def test_law_5_forward_kl_in_nats(p, q, expected):
    """.9 ln(.9/.5) + .1 ln(.1/.5) = .5290 - .1609 = .3681; the reverse KL would be .5108."""
    p, q = (torch.tensor([x], dtype=torch.float64).log() for x in (p, q))
    assert bake.token_kl(student_logits=q, teacher_logits=p).item() == pytest.approx(expected, abs=5e-5)

@given(n=st.integers(1, 5), V=st.integers(2, 50), scale=st.sampled_from([0.0, 1.0, 30.0]),
       seed=st.integers(0, 10 ** 6))
def test_law_5_token_kl_against_numpy(n, V, scale, seed):
    """Against numpy in fp64; never negative, and nothing between a distribution and itself."""
    rng = np.random.default_rng(seed)
    p, q = rng.normal(size=(2, n, V)) * scale
    kl = bake.token_kl(torch.tensor(q), torch.tensor(p))
    np.testing.assert_allclose(kl, numpy_kl(p, q), rtol=1e-9, atol=1e-12)
    assert (kl >= -1e-12).all() and (bake.token_kl(torch.tensor(p), torch.tensor(p)) == 0).all()

def test_law_5_half_precision_logits_are_compared_in_fp32():
    """In bf16 the sum over a large vocabulary has no digits left."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(4, 50_000, generator=g).bfloat16()
    q = (p.float() + 0.2 * torch.randn(4, 50_000, generator=g)).bfloat16()
    kl = bake.token_kl(q, p)
    assert kl.dtype == torch.float32
    np.testing.assert_allclose(kl, numpy_kl(p.float(), q.float()), rtol=1e-3)

def test_kernel_launches_do_not_depend_on_the_batch_size():
    """One batched call: with the same number of chunks, 8 samples take the operators of 1."""
    W = torch.randn(50, 8)

    def operators(B):
        student = torch.randn(B, 16 // B, 8, requires_grad=True)
        mask = torch.ones(B, 16 // B, dtype=torch.bool)
        teacher = torch.randn(B, 16 // B, 8)
        with torch.profiler.profile() as profile:
            bake.batched_kl(student, teacher, mask, lambda h: h @ W.T, chunk=8).sum().backward()
        memory = re.compile("copy|clone|empty|contiguous|reshape|view|as_strided|expand")
        return {e.key: e.count for e in profile.key_averages()
                if e.key.startswith("aten::") and not memory.search(e.key)}
    assert operators(1) == operators(8)

# ------------------------------------------------------------------------ targets and training

def test_law_4_micro_batches_do_not_change_the_gradient(folders, tmp_path):
    """The mean over samples of means over tokens, however the batch is cut; also the last, smaller
    batch is divided by its own size."""
    args = parse(folders(), "--batch-size", 5)
    model, head = loaded(args, dtype=torch.float64)
    examples = make_examples([(3, 4, 2), (1, 9, 7), (2, 2, 1), (5, 3, 9), (4, 4, 4)])
    targets = targets_for(model, examples, args, tmp_path)
    params = [p for p in model.parameters() if p.requires_grad]
    for batch in (examples, examples[:3]):
        results = []
        for args.micro_batch_size in (1, 2, 5):
            kl, norm = bake.train_step(model, head, batch, targets, params, args)
            results.append((kl, norm, lora_grads(model)))
        loop = loop_kl(model, batch).mean()
        for kl, norm, grads in results:
            torch.testing.assert_close(kl, loop.detach(), atol=1e-9, rtol=1e-9)
            torch.testing.assert_close(norm, results[0][1], atol=1e-9, rtol=1e-7)
            for name in grads:
                torch.testing.assert_close(grads[name], results[0][2][name], atol=1e-9, rtol=1e-7)

@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
def test_law_6_an_empty_difference_is_nothing(folders, family, tmp_path):
    """Teacher prompt = student prompt: KL 0 and gradient 0. Exactly, when both go the same way
    (GPT-2 and OPT have dropout in their config: it must be off), also with the model left in
    training mode and with gradient checkpointing; to rounding, through the prefix cache."""
    for flags in ([], ["--gradient-checkpointing"]):
        args = parse(folders(family), *flags, "--lr", 1e-9)
        model, head = bake.load_model(args)
        examples = make_examples([(0, 5, 3), (0, 9, 6), (0, 3, 1)], shared=0)
        for e in examples:
            e.student = e.teacher = e.teacher or e.student
        model.train()  # as somebody else may have left it
        targets = targets_for(model, examples, args, tmp_path, prefix=(0, None))
        assert model.training and model.eval()  # the mode was restored
        student, teacher, mask = bake.both_states(model, sorted(examples, key=lambda e: e.row), targets)
        kl = bake.batched_kl(student, teacher, mask, head)
        kl.sum().backward()
        assert (kl == 0).all()
        assert all((grad == 0).all() for grad in lora_grads(model).values())
        targets = targets_for(model, examples, args, tmp_path)
        log = bake.train(model, head, examples, targets, args, tmp_path)
        assert all(m["kl"] < 1e-7 for m in log[1:]) and len(log) == 4
        (tmp_path / "checkpoint.pt").unlink()

@pytest.mark.parametrize("family", FAMILIES)
def test_law_7_families(folders, family, tmp_path, capsys):
    """For many kinds of models: the head is the model's, prefix-cached is uncached, a stored target
    is a recomputed one, the loss is the loop's, and shared-prefix generation is plain generation."""
    recurrent = family in ("Mamba2", "Rwkv")
    args = parse(folders(family), *(["--target-modules", "in_proj"] if family == "Mamba2" else []))
    model, head = loaded(args)
    examples = make_examples([(9, 4, 5), (3, 9, 12), (6, 2, 1)], shared=12)
    prefix = bake.shared_prefix(model, examples)
    assert prefix[0] == (0 if recurrent else 12)
    assert ("every prompt in full" in capsys.readouterr().out) == recurrent
    cached = targets_for(model, examples, args, tmp_path, prefix).clone()
    again = targets_for(model, examples, args, tmp_path, prefix).clone()
    plain = targets_for(model, examples, args, tmp_path, (0, None)).clone()
    assert torch.equal(cached, again)  # a cache is not changed by its use
    torch.testing.assert_close(cached, plain, atol=1e-4, rtol=1e-4)
    ours = bake.batched_kl(*bake.both_states(model, examples, plain), head)
    torch.testing.assert_close(ours, loop_kl(model, examples), atol=1e-5, rtol=1e-4)

    if family == "Rwkv":
        return  # it has no mask for padding, see the README
    chat = bake.Chat(args)
    chat.stops = {chat.stop}
    prompts = [e.teacher for e in examples]
    with bake.teacher_mode(model):
        batched = bake.generate(model, chat, prompts, prefix, 8, 0.0)
        single = [bake.generate(model, chat, [p], (0, None), 8, 0.0)[0] for p in prompts]
    assert batched == single

def digest(state):
    return {n: hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for n, t in state.items()}

def test_law_8_only_the_adapters_change(folders, tmp_path):
    """Base weights and targets are bit for bit what they were; all of lora_A and lora_B has moved."""
    args = parse(folders(), "--epochs", 2, "--batch-size", 2)
    model, head = loaded(args)
    examples = make_examples([(3, 4, 2), (1, 9, 7), (2, 2, 3), (5, 3, 9)])
    targets = targets_for(model, examples, args, tmp_path)
    before, said = digest(model.state_dict()), targets.clone()
    bake.train(model, head, examples, targets, args, tmp_path)
    after = digest(model.state_dict())
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "lora_" in name}
    assert torch.equal(targets, said)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == changed

def test_law_9_training_goes_on_where_it_was(folders, tmp_path, monkeypatch):
    """k + m steps are k steps, a crash, and m steps: bit for bit, in weights and in the log."""
    examples = make_examples([(3, 4, 2), (1, 9, 7), (2, 2, 3), (5, 3, 9), (2, 2, 2)])
    examples[4].held_out = True

    def run(name, crash_at):
        (tmp_path / name).mkdir(exist_ok=True)
        args = parse(folders(), "--epochs", 3, "--batch-size", 1, "--save-every", 3)
        model, head = bake.load_model(args)
        targets = targets_for(model, examples, args, tmp_path)
        steps, plain = [], bake.train_step

        def step(*a):
            if len(steps) == crash_at:
                raise KeyboardInterrupt
            steps.append(1)
            return plain(*a)
        monkeypatch.setattr(bake, "train_step", step)
        try:
            log = bake.train(model, head, examples, targets, args, tmp_path / name)
        except KeyboardInterrupt:
            return None
        finally:
            monkeypatch.undo()
        clean = [{k: v for k, v in m.items() if k != "tokens_per_s"} for m in log]
        return clean, digest({n: p for n, p in model.state_dict().items() if "lora" in n})
    whole = run("whole", None)
    assert run("cut", 7) is None and run("cut", 2) is None
    assert run("cut", None) == whole
    assert [m["step"] for m in whole[0]] == list(range(13))

@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), size=st.integers(1, 9),
       seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_the_order_is_a_function_of_seed_and_epoch(lengths, size, seed, epoch):
    """Every example once an epoch, in full batches but for one; the same again for the same seed."""
    examples = [Example(str(i), [], [], [0] * n, [0]) for i, n in enumerate(lengths)]
    args = parse("x", "--batch-size", size, "--seed", seed)
    order = [[e.where for e in batch] for batch in bake.batches(examples, args, epoch)]
    assert order == [[e.where for e in b] for b in bake.batches(copy.deepcopy(examples), args, epoch)]
    assert sorted(sum(order, [])) == sorted(e.where for e in examples)
    assert sorted(map(len, order))[1:] == [size] * (len(order) - 1)

def test_batches_pad_little():
    """Lengths spread over 10..300: at least 85 % of what the network reads is real."""
    rng = np.random.default_rng(0)
    examples = [Example(str(i), [], [], [0] * 9, [0] * n) for i, n in enumerate(rng.integers(1, 292, 500))]
    made = bake.batches(examples, parse("x"), 0)
    assert made != bake.batches(examples, parse("x"), 1)
    real = sum(9 + len(e.response) for e in examples)
    padded = sum(len(b) * max(9 + len(e.response) for e in b) for b in made)
    assert real / padded >= 0.85

def test_the_learning_rate_rises_and_falls():
    args = parse("x", "--lr", 0.1, "--warmup", 0.2)
    rates = [bake.learning_rate(step, 10, args) for step in range(1, 11)]
    assert rates[:2] == [0.05, 0.1] and rates[1:] == sorted(rates[1:], reverse=True) and rates[-1] > 0
    assert bake.learning_rate(1, 10, parse("x", "--lr", 0.1, "--warmup", 0)) < 0.1

# ------------------------------------------------------------------------------------ data

def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
ONE = [([USER], "Ho")]
SHAPES = [
    ({"messages": [USER, REPLY]}, ONE),
    ({"messages": [USER], "response": "Ho"}, ONE),
    ({"messages": [USER]}, [([USER], None)]),
    ({"prompt": "Hi", "completion": "Ho"}, ONE),
    ({"prompt": [USER], "completion": [REPLY]}, ONE),
    ({"prompt": "Hi"}, [([USER], None)]),
    ({"prompt": "Hi", "completion": None}, [([USER], None)]),
    ({"prompt": "Hi", "response": "Ho", "extra": {"kept": "out"}}, ONE),
    ({"question": "Hi", "answer": "Ho"}, ONE),
    ({"instruction": "Hi", "input": "", "output": "Ho"}, ONE),
    ({"instruction": "Hi", "input": "you", "output": "Ho"}, [([USER | {"content": "Hi\n\nyou"}], "Ho")]),
    ({"user_message": "Hi", "response": "Ho"}, ONE),
    ("Hi", [([USER], None)]),
    ([USER, REPLY], ONE),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, ONE),
    ({"system": "S", "prompt": "Hi"}, [([{"role": "system", "content": "S"}, USER], None)]),
    ({"messages": [{"role": "developer", "content": "S"}, USER]},
     [([{"role": "system", "content": "S"}, USER], None)]),
    ({"messages": [USER, REPLY, USER, REPLY, USER]},
     [([USER], "Ho"), ([USER, REPLY, USER], "Ho"), ([USER, REPLY, USER, REPLY, USER], None)]),
    ({"prompt": "Hi", "answer": "Ho"}, ONE), ({"question": "Hi", "response": "No", "answer": "Ho"}, ONE),
    ({"prompt": [USER, REPLY, USER], "completion": "Ho"}, [([USER, REPLY, USER], "Ho")]),
    ({"messages": [USER | {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                   REPLY]}, ONE),
    ({"messages": [USER | {"content": "{{name}} {0} %s"}]}, [([USER | {"content": "{{name}} {0} %s"}], None)]),
]

@pytest.mark.parametrize("row, expected", SHAPES)
def test_every_shape_of_row(row, expected, tmp_path):
    """Any accepted shape -> one (context, response) per assistant turn, with all that came before."""
    assert bake.conversations(row) == expected
    for name, text in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row], indent=1))):
        (where, read), = bake.read_rows(write(tmp_path / name, text))
        assert (where, read) == (f"{tmp_path / name}:1", row)

@pytest.mark.parametrize("row, reason", [
    (7, "expected an object, found 7"), (None, "found None"),
    ({"text": "Hi"}, "found the keys ['text']"),
    ({"messages": "Hi"}, None), ({"messages": {}}, "the user message is {}"), ({"messages": []}, "found the roles"), ({"instruction": [], "input": "x"}, "found the roles"),
    ({"messages": [7]}, "found 7"), ({"messages": [{"role": "user"}]}, "the user message is None"),
    ({"messages": [USER | {"content": 5}]}, "is 5: expected text"),
    ({"messages": [USER | {"role": "tool"}]}, "role 'tool'"), ({"messages": [USER | {"role": None}]}, "role 'None'"),
    ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [USER | {"content": [{"type": "input_audio"}]}]}, "input_audio"),
    ({"messages": [USER | {"content": ["Hi"]}]}, "only text"),
    ({"messages": [USER, REPLY | {"content": None, "tool_calls": [{}]}]}, "tool calls"),
    ({"messages": [USER], "tools": [{}]}, "tools"),
    ({"messages": [REPLY, USER]}, "found the roles"), ({"messages": [USER, REPLY, REPLY]}, "found the roles"),
    ({"messages": [{"role": "system", "content": "S"}]}, "found the roles"),
    ({"messages": [USER, {"role": "system", "content": "S"}]}, "found the roles"),
    ({"messages": [USER | {"content": " "}]}, "is empty"), ({"prompt": "\ud800"}, "not valid UTF-8"),
    ({"prompt": "Hi", "completion": 3}, "is 3: expected text"), ({"prompt": "Hi", "completion": [USER]}, "found the roles"),
    ({"question": None, "answer": "Ho"}, "is None: expected text"),
])
def test_bad_rows_say_why(row, reason):
    if reason is None:  # text in place of messages is the user's
        assert bake.conversations(row) == [([USER], None)]
        return
    with pytest.raises(bake.BadRow, match=re.escape(reason)):
        bake.conversations(row)

def test_files(tmp_path):
    """BOM, CRLF, blank lines, U+2028 in a string, quotes and newlines in CSV, missing cells."""
    rows = bake.read_rows(write(tmp_path / "a.jsonl", '\ufeff{"prompt": "a\u2028é"}\r\n\r\n["x"\n"b"\n'))
    assert rows[0] == (f"{tmp_path / 'a.jsonl'}:1", {"prompt": "a\u2028é"})
    assert rows[1][0].endswith(":3") and "expected JSON" in str(rows[1][1]) and rows[2][1] == "b"
    text = 'question,answer\r\n"Why, ""you""?","a\nb"\r\nHow?\r\n'
    rows = bake.read_rows(write(tmp_path / "a.csv", text))
    assert [bake.conversations(r)[0][0][0]["content"] for _, r in rows] == ['Why, "you"?', "How?"]
    assert [bake.conversations(r)[0][1] for _, r in rows] == ["a\nb", None]
    assert [w.rsplit(":")[-1] for w, _ in rows] == ["3", "4"]
    (_, row), = bake.read_rows(write(tmp_path / "b.csv", "question,answer\nWhy, you?,no\n"))
    with pytest.raises(bake.BadRow, match="more cells"):
        bake.conversations(row)
    rows = bake.read_rows(write(tmp_path / "a.txt", "Why?\n  \nHow? \n"))
    assert rows == [(f"{tmp_path / 'a.txt'}:1", "Why?"), (f"{tmp_path / 'a.txt'}:3", "How?")]
    lines = bake.read_rows(write(tmp_path / "lines.json", '{"prompt": "a"}\n{"prompt": "b"}\n'))
    assert [r["prompt"] for _, r in lines] == ["a", "b"]
    (_, row), = bake.read_rows(write(tmp_path / "e.txt", b"\n\xff"))
    with pytest.raises(bake.BadRow, match="UTF-8"):
        bake.conversations(row)
    rows = bake.read_rows(write(tmp_path / "c.csv", f"question, answer\nWhy?,{'x' * 200_000}\n"))
    assert len(bake.conversations(rows[0][1])[0][1]) == 200_000
    with pytest.raises(SystemExit, match="q.csv:4: expected CSV"):
        bake.read_rows(write(tmp_path / "q.csv", 'question,answer\n"abc,def\nq2,a2\n'))
    for name, text, error in [("e.jsonl", "\n", "expected rows"), ("e.xml", "x", "expected .jsonl"), ("e.json", "[]", "expected rows")]:
        with pytest.raises(SystemExit, match=error):
            bake.read_rows(write(tmp_path / name, text))

def test_what_is_no_file_is_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """Its train split, row by row, through `datasets`; without that package, one line."""
    monkeypatch.setattr(bake.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="me/mine: no file"):
        bake.read_rows("me/mine")
    monkeypatch.undo()
    write(tmp_path / "datasets.py", "def load_dataset(path, split):\n    return [{'prompt': path + split}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert bake.read_rows("me/mine") == [("me/mine:1", {"prompt": "me/minetrain"})]
    del sys.modules["datasets"]

# -------------------------------------------------------------------------------- prompts

def chat_for(folder, *flags, **changes):
    args = parse(folder, *flags)
    return bake.Chat(args), args

def built(rows, chat, args):
    drops = defaultdict(list)
    return bake.build_examples([(f"f:{i}", row) for i, row in enumerate(rows, 1)], chat, args, drops), drops

def test_law_1_and_2_prompts(folders):
    """The sides differ in the prompt alone and end in the same response ids, which end in one stop
    id; multi-turn contexts are whole."""
    chat, args = chat_for(folders(), "--prompt", "Be brief.")
    (one, two), _ = built([{"messages": [USER, REPLY, USER, REPLY]}], chat, args)
    decode = chat.tokenizer.decode
    assert decode(one.teacher) == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert decode(one.student) == "<|user|>Hi<|end|><|assistant|>"
    assert decode(two.student) == "<|user|>Hi<|end|><|assistant|>Ho<|end|><|user|>Hi<|end|><|assistant|>"
    assert decode(one.response) == decode(two.response) == "Ho<|end|>"
    assert one.messages == [{"role": "system", "content": "Be brief."}, USER]
    (own,), _ = built([{"messages": [{"role": "system", "content": "Be brief."}, USER]}],
                      *chat_for(folders(), "--student-prompt", "Be."))
    assert decode(own.teacher) == decode(one.teacher) and own.response is None
    assert decode(own.student) == "<|system|>Be.<|end|>" + decode(one.student)

def test_prompts_that_do_not_fit_together(folders):
    system = {"role": "system", "content": "S"}
    for flags, row, reason in [(["--prompt", "P"], {"messages": [system, USER]}, "which one"),
                               ([], {"messages": [USER]}, "expected a prompt to bake"),
                               ([], {"messages": [system, USER | {"content": "a<|end|>"}]}, "control token"),
                               (["--prompt", "P"], {"prompt": "a", "completion": "<|user|>"}, "control token"),
                               (["--prompt", "P" * 600], "Hi", "no room left")]:
        with pytest.raises(SystemExit, match=f"f:1: .*{reason}"):
            built([row], *chat_for(folders(), *flags))
    assert parse("x", "--prompt-file", __file__).prompt.startswith('"""Tests')
    for flags in (["--prompt", " "], ["--epochs", 0], ["--lr", "nan"], ["--template-kwargs", "3"],
                  ["--prompt", "a", "--prompt-file", __file__], ["--eval-fraction", 1]):
        with pytest.raises(SystemExit):
            parse("x", *flags)

def test_rows_are_dropped_only_when_asked_and_counted(folders):
    """Empty responses are dropped and counted; bad rows stop the run, or with --skip-bad-rows too."""
    rows = [{"prompt": "a", "completion": " "}, 5, {"prompt": "b", "completion": "c"}, 6]
    with pytest.raises(SystemExit, match="f:2: expected an object"):
        built(rows, *chat_for(folders(), "--prompt", "P"))
    examples, drops = built(rows, *chat_for(folders(), "--prompt", "P", "--skip-bad-rows"))
    assert [e.where for e in examples] == ["f:3"]
    assert dict(drops) == {"the response is empty": ["f:1"], "expected an object, found 5": ["f:2"],
                           "expected an object, found 6": ["f:4"]}

def test_a_long_response_is_cut_on_both_sides_and_the_prompt_never(folders):
    chat, args = chat_for(folders(), "--prompt", "P")
    (e,), _ = built([{"prompt": "Hi", "completion": "x" * 600}], chat, args)
    assert e.cut and len(e.teacher) + len(e.response) == 512 and chat.stop not in e.response
    (e,), _ = built([{"prompt": "Hi", "completion": "x" * (511 - len(e.teacher))}], chat, args)
    assert not e.cut and e.response[-1] == chat.stop

GEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}" + GEN
NO_SYSTEM = LOOP.replace("<|{{", "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|{{")
DROPS = LOOP.replace("<|{{", "{% if m.role != 'system' %}<|{{").replace("<|end|>{% endfor", "<|end|>{% endif %}{% endfor")
MERGES = ("{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
          "{% set ns.s = m.content + '\n' %}{% else %}<|{{ m.role }}|>{{ ns.s + m.content }}<|end|>"
          "{% set ns.s = '' %}{% endif %}{% endfor %}" + GEN)
DEFAULT = "{% if messages[0].role != 'system' %}<|system|>I am Tiny.<|end|>{% endif %}" + LOOP
DATED = "<|system|>Today is {{ strftime_now('%Y-%m-%d') }}.<|end|>" + LOOP
THINKS = LOOP.replace(GEN, "{% if add_generation_prompt %}<|assistant|><think>{% if not deep %}</think>{% endif %}{% endif %}")
PARTS = ("{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>"
         "{% endfor %}" + GEN)
NO_STOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role != 'assistant' %}<|pad|>{% endif %}{% endfor %}" + GEN
AFTER = LOOP.replace("<|end|>", "<|end|>\n")
STRICT = ("{% for m in messages %}{% if m.role != 'system' and (m.role == 'user') != (loop.index0 % 2 == "
          "(1 if messages[0].role == 'system' else 0)) %}{{ raise_exception('roles must alternate') }}{% endif %}"
          "{% endfor %}" + LOOP)

@pytest.mark.parametrize("template, flags, teacher, student", [
    (LOOP, [], "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
    (NO_SYSTEM, [], "<|user|>PIRATE\n\nHi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
    (DROPS, [], "<|user|>PIRATE\n\nHi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
    (MERGES, [], "<|user|>PIRATE\nHi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
    (DEFAULT, [], "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|>",
     "<|system|>I am Tiny.<|end|><|user|>Hi<|end|><|assistant|>"),
    (DATED, [], "<|system|>Today is 2020-02-03.<|end|><|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|>",
     "<|system|>Today is 2020-02-03.<|end|><|user|>Hi<|end|><|assistant|>"),
    (THINKS, [], "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|><think></think>",
     "<|user|>Hi<|end|><|assistant|><think></think>"),
    (THINKS, ["--template-kwargs", '{"deep": true}'],
     "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|><think>", "<|user|>Hi<|end|><|assistant|><think>"),
    (PARTS, [], "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
    (NO_STOP, [], "<|system|>PIRATE<|pad|><|user|>Hi<|pad|><|assistant|>", "<|user|>Hi<|pad|><|assistant|>"),
    (AFTER, [], "<|system|>PIRATE<|end|>\n<|user|>Hi<|end|>\n<|assistant|>", "<|user|>Hi<|end|>\n<|assistant|>"),
    (STRICT, [], "<|system|>PIRATE<|end|><|user|>Hi<|end|><|assistant|>", "<|user|>Hi<|end|><|assistant|>"),
])
def test_chat_templates(folders, tmp_path, template, flags, teacher, student):
    """What templates do to a system message, and what each side then reads."""
    file = write(tmp_path / "t.jinja", template)
    args = parse(folders(), "--prompt", "PIRATE", "--chat-template", file, *flags)
    args.date = "2020-02-03"
    chat = bake.Chat(args)
    (e, f), _ = built([{"prompt": "Hi", "completion": "Ho"}, "Hi"], chat, args)
    assert (chat.tokenizer.decode(e.teacher), chat.tokenizer.decode(e.student)) == (teacher, student)
    assert chat.tokenizer.decode(e.response) == "Ho<|end|>" and f.teacher == e.teacher
    assert chat.folds == (template in (NO_SYSTEM, DROPS))
    with pytest.raises(SystemExit, match="f:1: .*must alternate"):
        built([{"messages": [USER, USER]}], *chat_for(folders(), "--prompt", "P", "--chat-template",
                                                      write(tmp_path / "s.jinja", STRICT)))

@pytest.mark.parametrize("pad", [None, "<|end|>", "<|pad|>"])
def test_one_bos_and_any_pad(folders, tmp_path, pad):
    """A tokenizer that adds a BOS by itself, a template that emits it: one BOS a side, none in a response. No pad
    token, or one that is a stop: the same ids, and greedy samples are those of a model with a pad token."""
    folder = tmp_path / "m"
    AutoModelForCausalLM.from_pretrained(folders()).save_pretrained(folder)
    tokenizer = make_tokenizer("<|system|>" + LOOP, pad=pad)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 257)])
    tokenizer.save_pretrained(folder)
    s, plain = Samples(str(folder)), Samples(folders(), "--chat-template", write(tmp_path / "t", "<|system|>" + LOOP))
    assert s.chat.tokenizer("a").input_ids[0] == 257  # it would add one
    rows = [{"prompt": "Hi", "completion": "Ho"}, "What?", "And a longer one?"]
    out, expected = s.run(rows, tmp_path / "a"), plain.run(rows, tmp_path / "b")
    assert [(e.teacher, e.student, e.response) for e in out] == [(e.teacher, e.student, e.response) for e in expected]
    assert all(e.student[0] == 257 and e.student.count(257) == 1 and e.teacher.count(257) == 2 for e in out)
    assert s.chat.tokenizer.decode(out[0].response) == "Ho<|end|>"

def test_each_row_may_bake_its_own_prompt(folders):
    """The prefix is what the prompts share; the report says that there are several."""
    rows = [{"system": text, "prompt": "Hi", "response": "Ho"} for text in ("Be brief.", "Be bold.")]
    chat, args = chat_for(folders())
    examples, _ = built(rows, chat, args)
    model, _ = loaded(args)
    assert [e.messages[0]["content"] for e in examples] == ["Be brief.", "Be bold."]
    assert bake.shared_prefix(model, examples)[0] == len(chat.ids("<|system|>Be b"))
    notes = bake.make_report(examples, 2, {}, [{"step": 0}], args)["notes"]
    assert any("2 different prompts" in note for note in notes)

def test_a_teacher_that_does_not_see_the_prompt_is_refused(folders, tmp_path):
    for template, reason in [("{% for m in messages %}{{ m.role }}{% endfor %}" + GEN, "drops"),
                             (LOOP.replace(GEN, "{% if messages[0].role == 'system' %}!{% endif %}"), "both prompts to end")]:
        with pytest.raises(SystemExit, match=f"f:1: .*{reason}"):
            built(["Hi"], *chat_for(folders(), "--prompt", "Hi", "--chat-template", write(tmp_path / "t", template)))

def test_white_space_that_leads_into_answers_is_theirs(folders, tmp_path):
    """[/INST] answer: the model emits the space, so a given response gets it, once."""
    file = write(tmp_path / "t", LOOP.replace("<|{{ m.role }}|>", "<|{{ m.role }}|>{{ ' ' if m.role == 'assistant' }}"))
    chat, args = chat_for(folders(), "--prompt", "P", "--chat-template", file)
    examples, _ = built([{"prompt": "Hi", "completion": text} for text in ("Ho", " Ho")], chat, args)
    assert [chat.tokenizer.decode(e.response) for e in examples] == [" Ho<|end|>"] * 2

def test_ids_in_a_row_are_kept_only_if_they_are_the_responses(folders):
    chat, args = chat_for(folders(), "--prompt", "P")
    (plain,), _ = built([{"prompt": "Hi", "response": "Ho"}], chat, args)
    for ids in (["x"], [1e99], [None], [-1], [10 ** 20], [[1]], 7, [], plain.response[:1], [256] + plain.response):
        if ids == [256] + plain.response:
            with pytest.raises(SystemExit, match="f:1: .*stop token"):
                built([{"prompt": "Hi", "response": "Ho", "ids": ids}], chat, args)
        else:
            (e,), _ = built([{"prompt": "Hi", "response": "Ho", "ids": ids}], chat, args)
            assert e.response == plain.response
    (e,), _ = built([{"prompt": "Hi", "response": "Ho", "ids": plain.response[:2]}], chat, args)
    assert e.response == plain.response[:2]  # cut by the length, no stop
    (e,), _ = built([{"prompt": "Hi", "response": "a<|user|>", "ids": chat.ids("a<|user|>")}], chat, args)
    assert e.response[-1] == chat.tokenizer.convert_tokens_to_ids("<|user|>")  # sampled by the model itself

def test_models_without_template_or_stop_and_adapters_are_refused(folders, tmp_path):
    tokenizer = make_tokenizer(None)
    AutoModelForCausalLM.from_pretrained(folders()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="--chat-template"):
        bake.Chat(parse(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit, match="adapter"):
        bake.Chat(parse(tmp_path))

class Seams:
    """A stand-in for tokenizers that mark the start of a text or merge across a seam."""

    def __init__(self, merge):
        self.stop, self.merge, self.lead = 0, merge, ""

    def ids(self, text):
        text = " " + text if text else ""
        return [1000 if pair == self.merge else ord(pair[0]) for pair in re.findall(
            f"{re.escape(self.merge)}|.", text, re.S)]

@pytest.mark.parametrize("tail, response, expected", [
    (">\n", "Ho", [72, 111, 0]), (">\n", "\nHo", [10, 72, 111, 0]), ("> ", " Ho", [32, 72, 111, 0])])
def test_responses_are_encoded_as_the_model_would_emit_them(tail, response, expected):
    """No mark of a text's start inside, and no token that spans prompt and response."""
    assert bake.encode_response(Seams("\n\n" if "\n" in tail else "  "), tail, response) == expected

def test_the_split_is_by_question(folders):
    """All rows and trajectories of a question are on one side; --eval-data takes its own out of
    training; the same whatever the order of the rows."""
    examples = [Example(f"r{i}", [{"role": "user", "content": f" q{i % 7} "}], [], [], [i]) for i in range(21)]
    args, drops = parse("x", "--eval-fraction", 0.25), defaultdict(list)
    kept = bake.split(examples, [], args, drops)
    held = {e.question for e in kept if e.held_out}
    assert len(kept) == 21 and len(held) == 2 and not held & {e.question for e in kept if not e.held_out}
    assert {e.question for e in bake.split(examples[::-1], [], args, drops) if e.held_out} == held
    apart = [Example("e", [{"role": "user", "content": "q3"}], [], [], [0])]
    kept = bake.split(examples, apart, parse("x", "--eval-data", "e"), drops)
    assert drops == {"the question is in --eval-data": ["r3", "r10", "r17"]}
    assert [e.question for e in kept if e.held_out] == ["q3"] and len(kept) == 19
    assert not any(e.held_out for e in bake.split(examples[:1], [], args, drops))

# ------------------------------------------------------------------------------- sampling

class Samples:
    """A model that records its generate calls, and a chat."""

    def __init__(self, folder, *flags, temperature=0):
        self.args = parse(folder, "--prompt", "Say much.", "--temperature", temperature,
                          "--max-new-tokens", 6, *flags)
        self.model, self.head = loaded(self.args)
        self.chat, self.calls = bake.Chat(self.args), []
        generate = self.model.generate
        self.model.generate = lambda **kw: self.calls.append(kw) or generate(**kw)

    def run(self, rows, path):
        self.examples, self.drops = built(rows, self.chat, self.args)
        prefix = bake.shared_prefix(self.model, self.examples)
        return bake.sample_responses(self.model, self.chat, self.examples, prefix, path, self.args, self.drops)

def test_sampling_in_one_call(folders, tmp_path):
    """All (row, trajectory) pairs of a batch in one call; under greedy decoding each gets what it
    would get alone, and goes back to its row; what has a response is left alone. The file is data."""
    s = Samples(folders())
    assert s.args.trajectories == 1  # greedy ones are all alike; here the pairs are to be told apart
    s.args.trajectories = 2
    rows = ["A long question, isn't it?", "Hi", {"prompt": "Q", "completion": "A"}, "Why so?"]
    out = s.run(rows, tmp_path / "t.jsonl")
    assert len(s.calls) == 1 and len(out) == 7
    assert [e.where for e in out].count("f:3") == 1
    for e in out:
        assert e.teacher == next(x.teacher for x in s.examples if x.where == e.where)
        if e.where != "f:3":
            with bake.teacher_mode(s.model):
                alone, = bake.generate(s.model, s.chat, [e.teacher], (0, None), 6, 0.0)
            assert e.response == alone
    again, _ = built([json.loads(line) for line in open(tmp_path / "t.jsonl")], bake.Chat(parse(folders())),
                     parse(folders()))
    assert [(e.teacher, e.student, e.response) for e in again] == \
        [(e.teacher, e.student, e.response) for e in out if e.where != "f:3"]

def test_nothing_to_sample_calls_nothing():
    examples = [Example("r", [], [], [], [1])]
    assert bake.sample_responses(None, None, examples, None, None, parse("x"), {}) is examples

def test_sampled_ids_are_cut_after_the_stop_and_never_given_one(folders, tmp_path, monkeypatch):
    """Cut after the first stop id; no stop is made up where the length ended it; nothing but a stop
    is no response. The pad id may be a stop id too."""
    s = Samples(folders(), "--trajectories", 1)
    stop, raw = s.chat.stop, {"f:1": [5, 6, 256, 9, 256], "f:2": [256, 256], "f:3": [1, 2, 3, 4, 5, 6]}
    by_prompt = {}

    def fake(input_ids, **_):
        new = [raw[by_prompt[len([i for i in row.tolist() if i != stop])]] for row in input_ids]
        new = [ids + [stop] * (6 - len(ids)) for ids in new]
        return torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)
    s.model.generate = fake
    rows = ["a", "bb", "ccc"]
    examples, _ = built(rows, s.chat, s.args)
    by_prompt.update({len([i for i in e.teacher if i != stop]): e.where for e in examples})
    out = s.run(rows, tmp_path / "t.jsonl")
    assert sorted((e.where, e.response) for e in out) == [("f:1", [5, 6, 256]), ("f:3", [1, 2, 3, 4, 5, 6])]
    assert s.drops["the sampled response is empty"] == ["f:2"]

def test_sampling_takes_nothing_from_the_checkpoint(tmp_path):
    """A generation_config with top_k=1, a repetition penalty and forced tokens must not leak in:
    at a high temperature 200 first tokens are many, spread as the logits say. Its eos ids do count."""
    folder = make_model(tmp_path / "m")
    hostile = dict(top_k=1, top_p=0.3, repetition_penalty=1.7, max_length=3, do_sample=True, num_beams=1,
                   forced_eos_token_id=7, suppress_tokens=[1, 2], eos_token_id=[256, 9], min_length=4)
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(hostile))
    s = Samples(folder, "--trajectories", 64, temperature=1.5)
    assert s.chat.stops == {256, 9} and s.chat.stop == 256
    out = s.run(["Hi", "Hi", "Hi", "Hi"], tmp_path / "t.jsonl")
    counts = np.bincount([e.response[0] for e in out], minlength=272)
    with torch.no_grad(), s.model.disable_adapter():
        logits = s.model(input_ids=torch.tensor([s.examples[0].teacher], device=DEVICE)).logits[0, -1]
    p = (logits / 1.5).softmax(-1).cpu().numpy()
    likely = p.argsort()[-5:]
    assert np.abs(counts[likely] / len(out) - p[likely]).max() < 0.12 and (counts > 0).sum() > 5
    assert any(len(e.response) == 6 for e in out)
    longest = max(out, key=lambda e: len(e.response))
    assert longest.response[-1] not in (7,) and not any(9 in e.response[:-1] for e in out)

def test_interrupted_sampling_goes_on_behind_the_last_whole_batch(folders, tmp_path):
    """The file cut at any byte, and the rest sampled: the same file, byte for byte."""
    s = Samples(folders(), "--trajectories", 3, "--batch-size", 1, temperature=1.0)
    rows = ["Hi", "Why?", "What is that?"]
    path = tmp_path / "t.jsonl"
    s.run(rows, path)
    whole, calls = path.read_bytes(), len(s.calls)
    assert calls == 3 and len(set(whole.split(b"\n"))) > 5
    for at in (0, 10, len(whole) // 2, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:at])
        s.calls.clear()
        s.run(rows, path)
        assert path.read_bytes() == whole
        assert len(s.calls) == calls - (3 if at == len(whole) else whole[:at].count(b"\n") // 4)

# ------------------------------------------------------------------------------ models, refused

def test_targets_that_touch_embeddings_or_head_are_refused(folders):
    model, _ = bake.load_model(parse(folders(), "--target-modules", "q_proj, v_proj"))
    assert {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n} == {"q_proj", "v_proj"}
    for names in ("lm_head,q_proj", "embed_tokens", "nothing_like_it", "q_proj,nope"):
        with pytest.raises(SystemExit, match="--target-modules"):
            bake.load_model(parse(folders(), "--target-modules", names))

def test_a_model_whose_logits_are_not_its_heads_is_refused(folders, monkeypatch):
    """Logits behind the head that make_head does not know of would be trained wrongly, in silence."""
    plain = bake.make_head
    monkeypatch.setattr(bake, "make_head", lambda base: lambda hidden: plain(base)(hidden) * 1.1)
    with pytest.raises(SystemExit, match="make_head"):
        bake.load_model(parse(folders("Gemma2")))

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_bases(folders, dtype, tmp_path):
    """LoRA and KL in fp32, loss and gradients finite, next to the fp32 ones."""
    examples = make_examples([(3, 4, 2), (1, 9, 7)])
    args = parse(folders(), "--dtype", dtype)
    model, head = loaded(args)
    targets = targets_for(model, examples, args, tmp_path)
    kl = bake.batched_kl(*bake.both_states(model, examples, targets), head)
    kl.sum().backward()
    grads = lora_grads(model)
    assert kl.dtype == torch.float32 and all(g.dtype == torch.float32 and g.isfinite().all() for g in grads.values())
    torch.testing.assert_close(kl, loop_kl(loaded(parse(folders()))[0], examples), atol=0.1, rtol=0.1)

# ----------------------------------------------------------------------------- a run, end to end

SYSTEM = {"role": "system", "content": "Answer like a pirate, please: *arr* <b>&</b> ```x```"}

@pytest.fixture(scope="session")
def pirates(tmp_path_factory):
    rows = [{"messages": [SYSTEM, {"role": "user", "content": f"Question {i}, what now?"}]} for i in range(12)]
    rows[0]["messages"].append({"role": "assistant", "content": "# Arr\r\n</pre>"})
    return write(tmp_path_factory.mktemp("data") / "rows.jsonl", "".join(json.dumps(r) + "\n" for r in rows))

def flags(model, data, out, *more):
    return ["--model", model, "--data", data, "--out", str(out), "--dtype", "float32", "--trajectories", "2",
            "--max-new-tokens", "12", "--epochs", "4", "--lr", "1e-2", "--eval-fraction", ".25", *more]

@pytest.fixture(scope="session")
def run(folders, pirates, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a" / "b"
    return out, bake.main(flags(folders(), pirates, out, "--merge"))

def test_a_run_bakes(run, capsys):
    """KL is at least halved on held-out questions; every number shown is in report.json."""
    out, report = run
    assert report == json.loads((out / "report.json").read_text())
    assert report["kl_after"] < 0.5 * report["kl_before"] and report["top1_after"] > report["top1_before"]
    assert report["recovered"] == pytest.approx(1 - report["kl_after"] / report["kl_before"])
    assert (report["rows_read"], report["rows_used"], report["rows_dropped"]) == (12, 12, 0)
    assert report["held_out_questions"] == 3 and report["trained_questions"] == 9
    assert {p.name for p in out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "args.json", "chat_template.jinja", "kl.svg", ".lock",
        "merged", "metrics.jsonl", "README.md", "report.json", "tokenizer.json", "tokenizer_config.json",
        "trajectories.jsonl"}
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in log] == list(range(len(log))) and log[-1]["eval_kl"] == report["kl_after"]
    assert {"kl", "lr", "grad_norm", "tokens_per_s", "epoch"} <= log[1].keys()
    assert len((out / "trajectories.jsonl").read_text().splitlines()) == 11 * 2
    assert json.loads((out / "args.json").read_text())["versions"]["torch"] == torch.__version__

def test_the_adapter_and_the_merged_model_are_what_was_trained(run, folders, pirates):
    """Loaded with PEFT as any adapter: only lora_A and lora_B, and the report's KL comes out of plain full-logits
    passes, sample by sample; the merged model's logits are the adapter's."""
    out, report = run
    names = load_file(out / "adapter_model.safetensors")
    assert names and all(re.search(r"lora_[AB]\.weight$", n) for n in names)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out).to(DEVICE)
    args, drops = parse(folders(), "--eval-fraction", .25), defaultdict(list)
    data, sampled = (bake.build_examples(bake.read_rows(str(path)), bake.Chat(args), args, drops)
                     for path in (pirates, out / "trajectories.jsonl"))
    questions = {e.question for e in bake.split(data, [], args, drops) if e.held_out}
    held = [e for e in data + sampled if e.question in questions and e.response]
    assert len(held) == report["held_out_responses"]
    with torch.no_grad():
        assert loop_kl(model, held).mean().item() == pytest.approx(report["kl_after"], abs=1e-5)
        ids = torch.tensor([held[0].teacher], device=DEVICE)
        merged = AutoModelForCausalLM.from_pretrained(out / "merged").to(DEVICE)
        assert (merged(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(out / "merged").chat_template == CHATML

def test_the_card_is_inert(run):
    """Markdown and HTML of prompt, questions and answers stand as code and break nothing."""
    out, report = run
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: ") and f"{report['recovered']:.4f}" in card
    inside = [line for line in card.split("\n") if "<b>" in line or "</pre>" in line or "```" in line]
    assert inside and all(line.startswith("    ") for line in inside)
    assert "<polyline points=" in (out / "kl.svg").read_text()

def test_the_same_command_again_says_that_it_is_done(run, folders, pirates, capsys, monkeypatch):
    """A finished run is not run again, and not overwritten by another one."""
    out, report = run
    before = {p: p.read_bytes() for p in out.iterdir() if p.is_file()}
    monkeypatch.setattr(bake, "load_model", None)
    assert bake.main(flags(folders(), pirates, out, "--merge")) == report
    assert "is done" in capsys.readouterr().out
    for more, reason in ((["--lr", ".5", "--seed", "3"], "lr: 0.01 there, 0.5 here; seed: 0 there, 3 here"), (["--prompt", "x"], "prompt")):
        with pytest.raises(SystemExit, match=reason):
            bake.main(flags(folders(), pirates, out, "--merge", *more))
    with pytest.raises(SystemExit, match="files of something else"):
        bake.main(flags(folders(), pirates, folders()))
    with pytest.raises(SystemExit, match="sha256 of data"):
        Path(pirates).write_text(Path(pirates).read_text() + "\n")
        try:
            bake.main(flags(folders(), pirates, out, "--merge"))
        finally:
            Path(pirates).write_text(Path(pirates).read_text()[:-1])
    assert {p: p.read_bytes() for p in out.iterdir() if p.is_file()} == before

def test_a_second_run_in_the_same_folder_stops(run, folders, pirates):
    out, _ = run
    import fcntl
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another run is at work"):
            bake.main(flags(folders(), pirates, out, "--merge"))

def test_runs_with_nothing_left_stop(folders, tmp_path):
    data = write(tmp_path / "rows.jsonl", '{"prompt": "a", "completion": ""}\n{"prompt": 3}\n')
    with pytest.raises(SystemExit, match="no row is left"):
        bake.main(flags(folders(), data, tmp_path / "out", "--prompt", "P", "--skip-bad-rows"))
    with pytest.raises(SystemExit, match="--eval-data; dropped.*the response is empty"):
        bake.main(flags(folders(), write(tmp_path / "ok.txt", "Hi"), tmp_path / "out", "--prompt", "P", "--eval-data",
                        write(tmp_path / "eval.jsonl", '{"prompt": "a", "completion": ""}')))
    with pytest.raises(SystemExit, match=r"rows.jsonl:2: .*is 3: expected text"):
        bake.main(flags(folders(), data, tmp_path / "out", "--prompt", "P"))

def test_micro_batches_and_checkpointing_give_the_same_result(folders, pirates, run, tmp_path):
    report = bake.main(flags(folders(), pirates, tmp_path / "m", "--micro-batch-size", "3",
                             "--gradient-checkpointing"))
    assert report["kl_after"] == pytest.approx(run[1]["kl_after"], abs=1e-3)

def test_a_failed_write_leaves_the_last_good_checkpoint(folders, pirates, run, tmp_path, monkeypatch):
    """A disk that fills up while a checkpoint is written: one line, and the one before is whole."""
    plain, saved = torch.save, []

    def save(state, path):
        if len(saved) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        saved.append(plain(state, path))
    monkeypatch.setattr(torch, "save", save)
    command = flags(folders(), pirates, tmp_path / "full", "--merge")
    with pytest.raises(SystemExit, match="checkpoint.pt: .*No space left.*still is"):
        bake.main(command)
    monkeypatch.undo()
    assert len(torch.load(tmp_path / "full" / "checkpoint.pt", weights_only=True)[2]) > 1
    assert bake.main(command) == run[1]

def test_a_step_that_is_not_finite_is_not_taken(folders, pirates, tmp_path, monkeypatch):
    plain, steps = bake.train_step, []

    def step(model, *rest):
        result = plain(model, *rest)
        steps.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        return result * (math.nan if len(steps) == 3 else 1)
    monkeypatch.setattr(bake, "train_step", step)
    with pytest.raises(SystemExit, match=r"step 3: KL nan, gradient norm nan, in .*rows.jsonl:\d+.* holds step 2"):
        bake.main(flags(folders(), pirates, tmp_path / "nan", "--save-every", "1"))
    weights, _, log = torch.load(tmp_path / "nan" / "checkpoint.pt", weights_only=True)
    assert [m["step"] for m in log] == [0, 1, 2]
    assert all(torch.equal(weights[n].to(DEVICE), w) and w.isfinite().all() for n, w in steps[2].items())

@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_in_one_line(folders, pirates, tmp_path, name):
    command = flags(folders(), pirates, tmp_path, "--epochs", "500", "--save-every", "1")
    process = subprocess.Popen([sys.executable, bake.__file__, *command], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    last = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in last
    assert last.strip().split("\n")[-1] == "stopped; what is done is kept in --out: the same command goes on from there"

@pytest.mark.parametrize("kls, training, extra, note", [
    ([.5, .6], .5, 9, "the bake failed"), ([.5, .45], .45, 9, "less than a fifth"), ([.0005, .0001], .01, 9, "does nothing"),
    ([.5, .1, .2], .2, 9, "an epoch had KL 0.1000"), ([.5, .2], .05, 9, "far below"), ([.5, .1], .1, 2, "fewer than 5"),
    ([.5, .05], .05, 9, None)])
def test_a_bake_that_failed_says_so(kls, training, extra, note):
    examples = [Example(str(i), [SYSTEM, {"role": "user", "content": f"{i}"}], [], [], [1], held_out=i < extra) for i in range(20)]
    log = [{"step": i, "kl": training, "eval_kl": kl, "eval_top1": 0.5} for i, kl in enumerate(kls)]
    report = bake.make_report(examples, 20, {"because": ["f:1", "f:2"]}, log, parse("x"))
    assert report["notes"][0] == "dropped 2: because (first: f:1)"
    assert len(report["notes"]) == 1 + (note is not None) and (note or "") in report["notes"][-1]
    assert ("recovered" in report) and (report["recovered"] is None) == (kls[0] < 1e-3)

KILLER = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import bake
def kill():
    time.sleep(float(sys.argv[3]))
    os.kill(os.getpid(), signal.SIGKILL)
plain = getattr(bake, sys.argv[2])
def phase(*args):  # the clock starts with the phase
    threading.Thread(target=kill, daemon=True).start()
    plain(*args)
    time.sleep(60)  # never past the phase: killed at its end at the latest
setattr(bake, sys.argv[2], phase)
bake.main(sys.argv[4:])
"""

@pytest.mark.skipif(DEVICE != "cpu", reason="bit-identity is promised on the CPU")
def test_a_run_survives_kill_9_at_any_moment(folders, pirates, tmp_path):
    """Killed again and again in each phase, a run ends with the bits of one that was left alone."""
    command = lambda out: flags(folders(), pirates, out, "--save-every", "3", "--batch-size", "2",
                                "--trajectories", "8", "--epochs", "2")
    whole, rng, kills, out = bake.main(command(tmp_path / "whole")), np.random.default_rng(0), [], tmp_path / "killed"
    killer = [sys.executable, "-c", KILLER, str(Path(bake.__file__).parent)]
    for phase, longest in [("sample_responses", 0.4), ("teacher_targets", 0.2), ("train", 0.4), ("samples", 0.1)]:
        for _ in range(3):
            done = subprocess.run([*killer, phase, str(rng.random() * longest), *command(out)],
                                  capture_output=True, text=True)
            assert done.returncode == -9, done.stderr
            kills.append((phase, sorted(p.name for p in out.iterdir())))
    assert len({str(names) for _, names in kills}) >= 3, kills
    assert bake.main(command(out)) == whole
    for name in ("adapter_model.safetensors", "trajectories.jsonl", "kl.svg"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name

# ----------------------------------------------------------------------------------- fuzz

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(
                        st.sampled_from(["role", "content", "from", "value", "type", "text", "tool_calls"])
                        | st.text(max_size=3), kids, max_size=3), max_leaves=8)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]),
                                        "content": st.text(max_size=6) | JSON}), max_size=5)
ROW = JSON | st.dictionaries(st.sampled_from(["messages", "prompt", "completion", "response", "question", "ids",
                                              "system", "instruction", "input", "conversations", "tools"]),
                             JSON | TURNS | st.text(max_size=9), max_size=4)

@given(rows=st.lists(ROW, max_size=4), prompt=st.sampled_from([None, "Be brief."]), skip=st.booleans(),
       name=st.sampled_from(["f.jsonl", "f.json", "f.txt", "f.csv"]), noise=st.binary(max_size=5))
@settings(max_examples=300)
def test_any_file_is_read_or_refused_by_line(folders, tmp_path_factory, rows, prompt, skip, name, noise):
    """Whatever the file holds: examples for which laws 1 and 2 hold, or one line that says where."""
    text = json.dumps(rows) if name == "f.json" else "\n".join(map(json.dumps, rows))
    path = write(tmp_path_factory.getbasetemp() / name, text.encode() + noise)
    args = parse(folders(), *(["--prompt", prompt] if prompt else []), *(["--skip-bad-rows"] if skip else []))
    chat = fuzz_chat(args)
    try:
        examples = bake.build_examples(bake.read_rows(path), chat, args, defaultdict(list))
    except SystemExit as error:
        assert re.match(re.escape(path) + r":(\d+: .+| expected rows)", str(error), re.S)
        return
    for e in examples:
        assert e.response is None or (set(e.response) - chat.stops and e.response[-1] in chat.stops)
        assert e.teacher[-1] == e.student[-1] and e.teacher != e.student and e.student
        assert chat.tokenizer.decode(e.student) in chat.tokenizer.decode(e.teacher)

def fuzz_chat(args, made={}):
    key = (args.model, args.chat_template)
    if key not in made:
        made[key] = bake.Chat(args)
    return made[key]

@given(template=st.sampled_from([LOOP, NO_SYSTEM, DROPS, MERGES, DEFAULT, DATED, THINKS, PARTS, NO_STOP, AFTER, STRICT]),
       prompt=st.text("abAB<|>{}% \n", min_size=1, max_size=9).filter(str.strip),
       texts=st.lists(st.text("abAB<|>{}%é \n", min_size=1, max_size=9).filter(str.strip), min_size=2, max_size=6))
@settings(max_examples=150)
def test_laws_1_and_2_for_any_template(folders, tmp_path_factory, template, prompt, texts):
    """Template behaviours x conversations: the prompt is in the teacher's context and in it alone;
    both end in one generation prompt, then the very same response ids, then one stop id."""
    file = write(tmp_path_factory.getbasetemp() / f"{hash(template)}.jinja", template)
    args = parse(folders(), "--prompt", prompt, "--chat-template", file)
    chat = fuzz_chat(args)
    texts = texts[:len(texts) // 2 * 2]
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    examples, _ = built([{"messages": turns}], chat, args)
    assert len(examples) == len(texts) // 2
    for i, e in enumerate(examples):
        teacher, student = chat.tokenizer.decode(e.teacher), chat.tokenizer.decode(e.student)
        assert teacher.count(prompt.strip()) > student.count(prompt.strip())
        assert chat.tokenizer.decode(e.response) == texts[2 * i + 1] + "<|end|>"
        assert "<|assistant|>" in student
        assert teacher.rpartition("<|assistant|>")[2] == student.rpartition("<|assistant|>")[2]

# ----------------------------------------------------------------------- measurements: make bench

DEMO = Path(bake.__file__).parent / "models" / "SmolLM2-135M-Instruct"

@pytest.fixture(scope="module")
def bench_model(tmp_path_factory):
    """The demo model in fp32 on a CPU; on CUDA the shape of Qwen3-0.6B with random weights, in bf16."""
    if DEVICE == "cpu":
        args = bake.parse_args(["--model", str(DEMO), "--data", "none"])
    else:
        folder = tmp_path_factory.mktemp("qwen")
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
            max_position_embeddings=40960)).to(torch.bfloat16).save_pretrained(folder)
        args = bake.parse_args(["--model", str(folder), "--data", "none"])
    model, head = bake.load_model(args)
    print(f"\n{transformers.__version__=} {torch.__version__=} {DEVICE} {args.dtype} "
          f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else torch.get_num_threads()}")
    return model, head, args

def sync():
    if DEVICE == "cuda":
        torch.cuda.synchronize()

def seconds(step):
    sync()
    start = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - start

def peak_memory(step):
    """Bytes allocated at the highest moment of a step, above those before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - start
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    memory = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(np.cumsum([n for _, n in sorted(memory)]).max(), 0)

def padded(examples, side, device):
    rows = [torch.tensor(getattr(e, side) + e.response) for e in examples]
    return torch.nn.utils.rnn.pad_sequence(rows, True).to(device)

def dense_step(model, head, examples, _):
    """One padded batch, (B, R, V) logits of both sides at the response positions, teacher run again."""
    logits = {}
    for side in ("teacher", "student"):
        with bake.teacher_mode(model) if side == "teacher" else contextlib.nullcontext():
            states = bake.hidden_states(model, padded(examples, side, model.device))
            logits[side] = torch.nn.utils.rnn.pad_sequence(
                [head(s[len(getattr(e, side)) - 1:][:len(e.response)]) for s, e in zip(states, examples)], True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(e.response)) for e in examples], True).to(model.device)
    kl = (bake.token_kl(logits["student"], logits["teacher"]) * mask).sum(1) / mask.sum(1)
    kl.mean().backward()
    return kl.mean()

def loop_step(model, head, examples, _):
    """Sample by sample, teacher run again."""
    total = 0
    for e in examples:
        ids = {s: torch.tensor([getattr(e, s) + e.response], device=model.device) for s in ("teacher", "student")}
        keep = dict(use_cache=False, logits_to_keep=len(e.response) + 1)
        with bake.teacher_mode(model):
            teacher = model(input_ids=ids["teacher"], **keep).logits[0, :-1]
        kl = bake.token_kl(model(input_ids=ids["student"], **keep).logits[0, :-1], teacher).mean() / len(examples)
        kl.backward()
        total += kl.detach()
    return total

def sft_step(model, head, examples, _):
    """Plain fine-tuning: cross-entropy on the same student tokens through the library's own loss."""
    ids = padded(examples, "student", model.device)
    labels = torch.full_like(ids, -100)
    for row, e, tokens in zip(labels, examples, ids):
        at = slice(len(e.student), len(e.student) + len(e.response))
        row[at] = tokens[at]
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()

@pytest.mark.bench
def test_bench_steps(bench_model, tmp_path):
    """A step of each way to bake, side by side: same tokens, same LoRA, same loss."""
    model, head, args = bench_model
    sizes, x, y, B = ((64, 512, 2048), 20, 64, 4) if DEVICE == "cpu" else ((64, 1000, 4000), 50, 150, 16)
    args.batch_size = args.micro_batch_size = B
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.0)
    print(f"\nB={B} x={x} y={y}\n{'u':>5} {'variant':13}{'s/step':>8}{'tokens/s':>9}{'x sft':>7}{'x dense':>8}{'peak MB':>9}")
    table = {}
    for u in sizes:
        examples = make_examples([(0, x, y)] * B, shared=u)
        prefix = bake.shared_prefix(model, examples)
        targets = targets_for(model, examples, args, tmp_path, prefix)

        def later(*_):
            return bake.train_step(model, head, examples, targets, params, args)[0]
        def first_epoch(*_):
            with bake.teacher_mode(model):
                bake.response_states(model, examples, "teacher", prefix)
            return later()
        steps = {"loop": loop_step, "dense": dense_step, "first epoch": first_epoch, "later epochs": later, "sft": sft_step}

        def whole(step):
            loss = step(model, head, examples, None)
            optimizer.step()
            optimizer.zero_grad()
            return loss
        losses = {name: whole(step) for name, step in steps.items()}  # the warm-up
        for name in ("dense", "first epoch", "later epochs"):
            assert abs(losses[name] - losses["loop"]) < (1e-5 if DEVICE == "cpu" else 1e-2), losses
        times = defaultdict(list)
        for _ in range(5 if u < 2000 else 3):
            for name, step in steps.items():
                for _ in range(1 if name in ("loop", "dense") else 2):
                    times[name].append(seconds(lambda: whole(step)))
        median = {name: float(np.median(ts)) for name, ts in times.items()}
        for name, step in steps.items():
            table[u, name] = t = median[name]
            print(f"{u:5} {name:13}{t:8.3f}{B * y / t:9.0f}{t / median['sft']:7.2f}{t / median['dense']:8.3f}"
                  f"{peak_memory(lambda: whole(step)) / 2 ** 20:9.0f}")
    if DEVICE == "cuda":  # a step waits for nothing: it would raise here
        torch.cuda.set_sync_debug_mode("error")
        later()
        torch.cuda.set_sync_debug_mode("default")
    short, middle, long = sizes
    print(f"later epochs, {long} / {short} tokens of prompt: {table[long, 'later epochs'] / table[short, 'later epochs']:.2f}; "
          f"dense / later: {table[middle, 'dense'] / table[middle, 'later epochs']:.1f} at {middle}, "
          f"{table[long, 'dense'] / table[long, 'later epochs']:.1f} at {long}; dense / first: "
          f"{table[middle, 'dense'] / table[middle, 'first epoch']:.1f}, {table[long, 'dense'] / table[long, 'first epoch']:.1f}")

@pytest.mark.bench
def test_bench_loss_memory(bench_model):
    """What forward and backward of the loss allocate, against dense (N, V) logits."""
    model, head, _ = bench_model
    D = model.config.get_text_config().hidden_size

    def ours(N):
        student = torch.randn(8, N // 8, D, device=DEVICE, dtype=model.dtype, requires_grad=True)
        teacher, mask = student.detach() + 1, torch.ones(8, N // 8, dtype=torch.bool)
        return lambda: bake.batched_kl(student, teacher, mask, head).sum().backward()

    def dense(N):
        student = torch.randn(N, D, device=DEVICE, dtype=model.dtype, requires_grad=True)
        teacher = student.detach() + 1
        return lambda: bake.token_kl(head(student), head(teacher)).sum().backward()
    small, large, full = (peak_memory(step) / 2 ** 20 for step in (ours(2048), ours(8192), dense(2048)))
    print(f"\nloss memory, MB: batched_kl {small:.0f} at 2,048 tokens, {large:.0f} at 8,192; dense {full:.0f} at 2,048: "
          f"{100 * small / full:.1f} %")
    gradient = 8192 * D * model.dtype.itemsize / 2 ** 20
    assert small <= 0.1 * full and large - small <= gradient, gradient

@pytest.mark.bench
def test_bench_sampling(bench_model, tmp_path):
    """Tokens a second of one call for all pairs with a shared prefix, against a call for each pair."""
    model, _, args = bench_model
    chat = bake.Chat(bake.parse_args(["--model", str(DEMO), "--data", "none"]))
    chat.stops, chat.stop = {chat.vocab - 1}, chat.vocab - 1  # next to never sampled: full lengths
    prompts = [e.teacher for e in make_examples([(0, 20, 1)] * 8, shared=512) for _ in range(4)]
    prefix = bake.shared_prefix(model, [Example("", [], p, [], []) for p in prompts])
    with bake.teacher_mode(model):
        one = seconds(lambda: [bake.generate(model, chat, [p], (0, None), 32, 1.0) for p in prompts])
        many = seconds(lambda: bake.generate(model, chat, prompts, prefix, 32, 1.0))
    n = len(prompts) * 32
    print(f"\nsampling, u=512, 8 rows x 4, 32 tokens: {n / one:.0f} tokens/s one by one, {n / many:.0f} in one call: "
          f"{one / many:.1f} x")

@pytest.mark.bench
def test_bench_whole_run(bench_model, tmp_path):
    """Three epochs at u=512: target pass and steps, against dense steps throughout."""
    model, head, args = bench_model
    examples = make_examples([(0, 20, 64)] * 16, shared=512)
    args.batch_size = args.micro_batch_size = 4
    params = [p for p in model.parameters() if p.requires_grad]

    def dense():
        for i in list(range(0, 16, 4)) * 3:
            dense_step(model, head, examples[i:i + 4], None)
            model.zero_grad()

    def ours():
        targets = targets_for(model, examples, args, tmp_path)
        for epoch in range(3):
            for batch in bake.batches(examples, args, epoch):
                bake.train_step(model, head, batch, targets, params, args)
                model.zero_grad()
    a, b = seconds(dense), seconds(ours)
    print(f"\nwhole run, u=512, 3 epochs of 16 responses: dense {a:.1f} s, bake.py {b:.1f} s: {a / b:.1f} x")

@pytest.mark.bench
def test_bench_many_rows(folders, tmp_path):
    """20,000 rows of 200 response tokens: time to start, and memory and time a step in training."""
    def anonymous():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    for n in (5_000, 20_000):
        data = write(tmp_path / "many.jsonl", "".join(json.dumps({"prompt": f"Question {i}?", "completion": "word " * 40}) + "\n" for i in range(n)))
        args = parse(folders(), "--prompt", "Be brief. " * 20, "--batch-size", 32, "--eval-fraction", 0, data=data)
        chat = bake.Chat(args)
        start = time.perf_counter()
        examples = bake.build_examples(bake.read_rows(data), chat, args, defaultdict(list))
        loading, before = time.perf_counter() - start, anonymous()
        model, head = bake.load_model(args)
        targets = targets_for(model, examples, args, tmp_path)
        after_targets = anonymous()
        params, times = [p for p in model.parameters() if p.requires_grad], []
        for batch in bake.batches(examples, args, 0):
            times.append(seconds(lambda: bake.train_step(model, head, batch, targets, params, args)))
            model.zero_grad()
        third, peak = len(times) // 3, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\n{n} rows: read and encoded in {loading:.1f} s ({1e6 * loading / n:.0f} us a row); private memory, MB: "
              f"{before:.0f} loaded, {after_targets:.0f} after the targets, {anonymous():.0f} after training, peak with the "
              f"mapped file {peak:.0f}; ms a step: {1e3 * np.median(times[:third]):.1f} in the first third, "
              f"{1e3 * np.median(times[-third:]):.1f} in the last")
