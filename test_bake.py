"""Tests of bake.py, each named after the law it holds:

1. Both sides end in the same response ids, tokenised once; sampled ids are kept end to end.
2. A response at [s, e) is predicted by positions [s-1, e-1); its end-of-turn token is trained too.
3. batched_kl is the per-sample loop over unpadded sequences, in loss and in LoRA gradients.
4. The loss is the mean over samples of means over tokens, however a batch is cut.
5. KL >= 0, KL(p, p) = 0, and it is the forward KL, in nats.
6. Baking an empty difference gives 0 and a zero gradient.
7. Prefix-cached is uncached, for teacher, sampling and student; stored targets are recomputed ones.
8. The base weights and the teacher never change; nothing but lora_A and lora_B trains.
9. A run that is killed anywhere and started again ends in the same bits.
10. Nothing in the data is read as something else or left out in silence: used whole, or refused.
11. Part 1 stands alone.

Laws 1, 2 and 10 have a file of their own, examples/test_data.py, and so have the kinds of models,
examples/test_models.py. Models are tiny, random and made here: no network. Hypothesis draws the
structure, seeded generators the tensors. `make test` runs them all, on CUDA if there is one."""
import copy
import functools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import peft
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

import bake
from bake import Example, Prefix, RowExample

settings.register_profile("bake", settings.get_profile("ci"), max_examples=40)  # no deadline, and
settings.load_profile("bake")  # derandomised
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(bake.__file__).parent

# -------------------------------------------------------------------------- tiny models, made here
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]  # ids 256 to 260
TURN = "<|{{ m.role }}|>{{ m.content | trim }}<|end|>"

def template_of(turn, start="<|assistant|>"):
    """A chat template: `turn` for each message m, and then the start of an answer."""
    turns = "{% for m in messages %}" + turn + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}{{ '" + start + "' }}{% endif %}"

PLAIN = template_of(TURN)

def make_tokenizer(template=PLAIN, pad="<|pad|>", bos=None):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet + SPECIAL)}
    return GPT2Tokenizer(vocab, [], eos_token="<|end|>", pad_token=pad, bos_token=bos,
                         unk_token=None, add_bos_token=bos, extra_special_tokens=SPECIAL,
                         chat_template=template)

SIZE = {"vocab_size": 272, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
        "pad_token_id": 260, "eos_token_id": 256}
FAMILIES = {  # what they need beside SIZE
    "Llama": {},
    "GPT2": {},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "Rwkv": {"attention_hidden_size": 32},
}

def make_model(folder, family="Llama", tokenizer=None, **size):
    """A random model, scaled up until what it predicts is far from uniform, with its tokenizer."""
    torch.manual_seed(0)
    size = SIZE | FAMILIES[family] | size
    config = getattr(transformers, f"{family}Config")(**size, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        if param.dim() == 2:
            param.data *= 4
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return str(folder)

@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """folders(family) -> the folder of such a model, made once."""
    @functools.cache
    def folder(family="Llama"):
        return make_model(tmp_path_factory.mktemp(family), family)
    return folder

def parse(model, *flags, **more):
    start = ["--model", str(model), "--data", "no", "--dtype", "float32", "--rank", "4"]
    args = bake.parse_args(start + [str(flag) for flag in flags])
    for name, value in more.items():
        setattr(args, name, value)
    return args

def loaded(folder, *flags, **more):
    """-> model, head, arguments. The adapters do something: B is not zero."""
    args = parse(folder, *flags, **more)
    model, head = bake.load_model(args)
    torch.manual_seed(0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    return model, head, args

@pytest.fixture(scope="session")
def model64(folders):
    """GPT-NeoX, as its norms stay in fp64; Llama's go through fp32."""
    return loaded(folders("GPTNeoX"), dtype="float64")

def lora(model):
    return [param for param in model.parameters() if param.requires_grad]

def random_ids(rng, count):
    return rng.integers(0, 256, count).tolist()

def make_examples(sizes, seed=0, shared=6):
    """[(teacher extra, student, response)] lengths -> examples, alike for `shared` tokens."""
    rng = np.random.default_rng(seed)
    teacher_start = random_ids(rng, shared)
    student_start = random_ids(rng, shared)
    examples = []
    for extra, own, length in sizes:
        teacher_prompt = teacher_start + random_ids(rng, extra + own)
        student_prompt = student_start + random_ids(rng, own)
        examples.append(Example(teacher_prompt, student_prompt, random_ids(rng, length)))
    return examples

def prefix_of(model, examples):
    return bake.exact_prefix(model, [e.teacher_prompt for e in examples])

def fill_targets(model, examples, folder, prefix=None, batch_size=8):
    """Sets the examples' targets -> all of them, (N, D)."""
    if prefix is None:
        prefix = prefix_of(model, examples)
    bake.teacher_targets(model, examples, prefix, Path(folder) / "targets", batch_size)
    return torch.cat([e.target for e in examples])

def trained(model, head, examples, args, out):
    """bake.train without held-out examples -> its log."""
    for e in examples:
        e.where = "row"
    return bake.train(model, head, examples, [], args, out)

def loop_log_probs(model, prompt, response):
    ids = torch.tensor([prompt + response], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, -len(response) - 1:-1]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

def loop_kl(model, examples):
    """The reference: sample by sample, no padding, no cache, full logits, teacher run again."""
    values = []
    for e in examples:
        with torch.no_grad(), model.disable_adapter():
            log_p = loop_log_probs(model, e.teacher_prompt, e.response)
        log_q = loop_log_probs(model, e.student_prompt, e.response)
        values.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return torch.stack(values)

def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(data)
    return str(path)

def refused(reason, call, *args, error=SystemExit):
    with pytest.raises(error, match=reason):
        call(*args)

# ----------------------------------------------------------------------------------------- the loss
def made_loss_case(lengths, double, seed):
    """-> student, teacher, mask, head: real tokens anywhere in a row, padding that holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=dtype).to(DEVICE)

    order = torch.rand(len(lengths), max(lengths) + 2, generator=generator).argsort(1)
    mask = (order < torch.tensor(lengths)[:, None]).to(DEVICE)
    matrix = draw(23, 8)

    def head(hidden):
        return 3 * torch.tanh(hidden @ matrix.T / 3)

    student = draw(*mask.shape, 8).masked_fill(~mask[..., None], math.nan)
    teacher = draw(*mask.shape, 8).masked_fill(~mask[..., None], math.nan)
    return student, teacher, mask, head

@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), chunk=st.integers(1, 60),
       temperature=st.sampled_from([0.5, 1.0, 2.0]), double=st.booleans(),
       seed=st.integers(0, 10 ** 6))
@example(lengths=[0, 0], chunk=3, temperature=1.0, double=True, seed=0)
@settings(max_examples=150)
def test_law_3_batched_kl_is_the_per_sample_loop(lengths, chunk, temperature, double, seed):
    """Any batch and chunk: the loop's loss and gradient. NaN in the padding reaches neither."""
    student, teacher, mask, head = made_loss_case(lengths, double, seed)
    ours = student.clone().requires_grad_()
    theirs = student.clone().requires_grad_()
    kl = bake.batched_kl(ours, teacher, mask, head, temperature, chunk)
    loop = []
    for s, t, real in zip(theirs, teacher, mask):
        log_q = (head(s[real]) / temperature).log_softmax(-1)
        log_p = (head(t[real]) / temperature).log_softmax(-1)
        loop.append((log_p.exp() * (log_p - log_q)).sum() / max(int(real.sum()), 1))
    weights = torch.arange(1, len(lengths) + 1, device=DEVICE)
    (kl * weights).sum().backward()
    (torch.stack(loop) * weights).sum().backward()
    tight = 1e-9 if double else 1e-5
    assert_close(kl, torch.stack(loop), atol=tight, rtol=tight)
    assert_close(ours.grad[mask], theirs.grad[mask], atol=tight, rtol=tight)
    assert (ours.grad[~mask] == 0).all()

def test_the_loss_pasted_elsewhere():
    """A head that is trained and a second backward are refused; a teacher gets no gradient."""
    student, teacher, mask, head = made_loss_case([3, 2], False, 0)
    student.requires_grad_()
    teacher.requires_grad_()
    kl = bake.batched_kl(student, teacher, mask, head).sum()
    kl.backward(retain_graph=True)
    assert teacher.grad is None and student.grad is not None
    refused("a second backward", kl.backward, error=RuntimeError)
    trained = torch.nn.Linear(8, 23, device=DEVICE)
    with pytest.raises(ValueError, match="freeze its parameters"):
        bake.batched_kl(student, teacher, mask, trained)
    for given in ((student, teacher[:, :-1], mask), (student, teacher, mask.T),
                  (student, teacher, mask.float())):
        refused("expected .* bool mask, found", bake.batched_kl, *given, head, error=ValueError)

def test_the_loss_under_autocast():
    """The head computes in bf16 there; the KL stays in fp32, its gradient in the states' type."""
    student, teacher, mask, _ = made_loss_case([3, 2], False, 0)
    student.requires_grad_()
    head = torch.nn.Linear(8, 23, device=DEVICE).requires_grad_(False)
    expected = bake.batched_kl(student, teacher, mask, head)
    with torch.autocast(DEVICE, torch.bfloat16):
        kl = bake.batched_kl(student, teacher, mask, head)
        kl.sum().backward()
    assert kl.dtype == torch.float32 and student.grad.dtype == torch.float32
    assert_close(kl, expected, atol=0.02, rtol=0.02)

def test_law_5_forward_kl_in_nats():
    """.9 ln(.9/.5) + .1 ln(.1/.5) = .5290 - .1609 = .3681; the reverse KL would be .5108."""
    p = torch.tensor([[.9, .1], [.5, .5], [.2, .8]]).double().log()
    q = torch.tensor([[.5, .5], [.9, .1], [.2, .8]]).double().log()
    kl = bake.token_kl(student_logits=q, teacher_logits=p)
    assert np.allclose(kl, [.3681, .5108, 0], atol=4.5e-5)

@given(n=st.integers(1, 5), vocabulary=st.integers(2, 50) | st.just(50_000),
       scale=st.sampled_from([0.0, 1.0, 30.0]), near=st.booleans(), half=st.booleans(),
       seed=st.integers(0, 10 ** 6))
@example(n=4, vocabulary=50_000, scale=1.0, near=True, half=True, seed=0)
def test_law_5_token_kl_against_numpy(n, vocabulary, scale, near, half, seed):
    """Never negative, 0 of a distribution and itself; in fp32 for bf16, where sums lose digits."""
    dtype = torch.bfloat16 if half else torch.float64
    p, noise = torch.tensor(np.random.default_rng(seed).normal(size=(2, n, vocabulary)) * scale)
    q = p + 0.2 * noise if near else noise
    p = p.to(dtype)
    q = q.to(dtype)
    kl = bake.token_kl(q, p)
    p_exact = np.exp(p.double().numpy())
    q_exact = np.exp(q.double().numpy())
    p_exact /= p_exact.sum(-1, keepdims=True)
    q_exact /= q_exact.sum(-1, keepdims=True)
    expected = (p_exact * np.log(p_exact / q_exact)).sum(-1)
    rtol = 1e-3 if half else 1e-9
    atol = 1e-7 if half else 1e-12
    np.testing.assert_allclose(kl, expected, rtol=rtol, atol=atol)
    assert kl.dtype == torch.promote_types(dtype, torch.float32)
    assert (kl >= -atol).all() and (bake.token_kl(p, p) == 0).all()

def test_kernel_launches_do_not_depend_on_the_batch_size():
    """One batched call: with the same number of chunks, 8 samples take the operators of 1."""
    moves = re.compile("copy|clone|empty|contiguous|reshape|view|as_strided|expand")

    def head(hidden):
        return hidden @ torch.ones(8, 50)

    def operators(batch_size, length):
        student = torch.randn(batch_size, length, 8, requires_grad=True)
        teacher = torch.randn(batch_size, length, 8)
        mask = torch.ones(batch_size, length, dtype=torch.bool)
        with torch.profiler.profile() as profile:
            bake.batched_kl(student, teacher, mask, head, chunk=8).sum().backward()
        counts = {event.key: event.count for event in profile.key_averages()}
        return {key: n for key, n in counts.items()
                if key[:6] == "aten::" and not moves.search(key)}

    assert operators(1, 16) == operators(8, 2)

# ---------------------------------------------------------------------- gradients through the model
@given(sizes=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=5),
       micro=st.integers(1, 5), shared=st.integers(0, 7), order=st.randoms(use_true_random=False))
def test_laws_3_4_7_gradients_are_those_of_the_loop(model64, sizes, micro, shared, order,
                                                     tmp_path_factory):
    """Through prefixes of both sides, targets file, padding, and a step cut into micro-batches."""
    model, head, _ = model64
    examples = make_examples(sizes, seed=len(sizes), shared=shared)
    fill_targets(model, examples, tmp_path_factory.getbasetemp())
    order.shuffle(examples)
    params = lora(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bake.PAYS, DEVICE, 1)
        ours = bake.batch_kl(model, head, examples)
        loop = loop_kl(model, examples)
        assert_close(ours, loop, atol=1e-9, rtol=1e-9)
        grads = torch.autograd.grad(ours.mean(), params)
        expected = torch.autograd.grad(loop.mean(), params)
        assert_close(grads, expected, atol=1e-9, rtol=1e-7)
        assert len(grads) == 2 * 4 * 2  # A and B of 4 linear maps in 2 layers
        model.zero_grad()
        kl, norm = bake.train_step(model, head, examples, params, micro)
    assert_close(kl, loop.mean().detach(), atol=1e-9, rtol=1e-9)
    full_norm = torch.stack([grad.norm() for grad in expected]).norm()
    assert_close(norm, full_norm, atol=1e-9, rtol=1e-7)
    clipped = [grad / max(full_norm + 1e-6, 1) for grad in expected]
    assert_close([param.grad for param in params], clipped, atol=1e-9, rtol=1e-7)

def test_law_7_the_student_prefix_is_used_where_it_pays(folders, tmp_path, monkeypatch):
    """One read of what a batch shares, behind it each row is shorter; not below the threshold."""
    model, head, _ = loaded(folders())
    examples = make_examples([(2, 4, 3), (2, 5, 6), (2, 3, 4)], shared=20)
    fill_targets(model, examples, tmp_path)
    widths = []
    plain = bake.run_trunk

    def run_trunk(model, ids, *args, **kwargs):
        widths.append(ids.shape)
        return plain(model, ids, *args, **kwargs)

    monkeypatch.setattr(bake, "run_trunk", run_trunk)
    for pays, expected in ((41, [(3, 30)]), (40, [(1, 20), (3, 10)])):
        monkeypatch.setitem(bake.PAYS, DEVICE, pays)
        widths.clear()
        bake.batch_kl(model, head, examples)
        assert [tuple(width) for width in widths] == expected
    assert model.config.use_cache
    model.config.use_cache = False
    widths.clear()
    bake.batch_kl(model, head, examples)
    assert len(widths) == 1

@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
@pytest.mark.parametrize("flags", [[], ["--gradient-checkpointing"]])
def test_law_6_an_empty_difference_is_nothing(folders, family, flags, tmp_path):
    """Equal prompts: KL and gradient 0, though GPT-2 and OPT have dropout and are left training."""
    args = parse(folders(family), *flags, "--lr", 1e-9)
    model, head = bake.load_model(args)
    examples = make_examples([(0, 5, 3), (0, 9, 6), (0, 3, 1)], shared=0)
    for e in examples:
        e.student_prompt = e.teacher_prompt
    model.train()
    fill_targets(model, examples, tmp_path, Prefix())
    assert model.training  # the mode was restored
    model.eval()
    kl = bake.batch_kl(model, head, examples)
    grads = torch.autograd.grad(kl.sum(), lora(model))
    assert (kl == 0).all() and all((grad == 0).all() for grad in grads)
    log = trained(model, head, examples, args, tmp_path)
    assert all(entry["kl"] < 1e-7 for entry in log[1:]) and len(log) == 4

def test_targets_of_other_examples_are_refused(model64, tmp_path):
    """By their number: here it is twice that of the tokens."""
    model, _, _ = model64
    examples = make_examples([(3, 4, 2), (1, 9, 7)])
    fill_targets(model, examples, tmp_path)
    path = tmp_path / "targets"
    path.write_bytes(path.read_bytes() * 2)
    refused("of other examples", bake.read_targets, model, examples, path, error=ValueError)

def test_an_example_has_a_token_of_each(model64):
    model, head, _ = model64
    for example in (Example([1], [], [2], torch.ones(1, 32)), Example([1], [1], [])):
        refused("at least one token", bake.batch_kl, model, head, [example], error=ValueError)

def test_evaluation_is_in_order_and_counts_first_places(model64, tmp_path):
    model, head, _ = model64
    examples = make_examples([(3, 4, 2), (1, 9, 7), (2, 2, 5)])
    fill_targets(model, examples, tmp_path)
    scores = bake.evaluate(model, head, examples, micro_batch_size=2)
    assert_close(torch.tensor([kl for kl, _ in scores], device=DEVICE), loop_kl(model, examples),
                 check_dtype=False)
    for e, (_, top1) in zip(examples, scores):
        with torch.no_grad(), model.disable_adapter():
            teacher = loop_log_probs(model, e.teacher_prompt, e.response).argmax(-1)
        student = loop_log_probs(model, e.student_prompt, e.response).argmax(-1)
        assert top1 == pytest.approx((teacher == student).float().mean().item())

@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), size=st.integers(1, 9),
       seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_the_order_is_a_function_of_seed_and_epoch(lengths, size, seed, epoch):
    examples = [Example([], [0] * n, [0]) for n in lengths]
    order = bake.batches(examples, size, seed, epoch)
    assert order == bake.batches(examples, size, seed, epoch)
    flat = [e for batch in order for e in batch]
    assert sorted(map(id, flat)) == sorted(map(id, examples))
    assert sorted(map(len, order))[1:] == [size] * (len(order) - 1)

def test_batches_pad_little():
    """Real tokens are 85 % of what is read, with lengths spread over 10 to 300."""
    lengths = np.random.default_rng(0).integers(1, 292, 500)
    examples = [Example([], [0] * 9, [0] * n) for n in lengths]
    made = bake.batches(examples, 8, seed=0, epoch=0)
    read = 0
    for batch in made:
        read += len(batch) * max(9 + len(e.response) for e in batch)
    assert sum(9 + lengths) / read >= 0.85
    assert made != bake.batches(examples, 8, seed=0, epoch=1)

def test_the_learning_rate_rises_and_falls():
    usual = [bake.learning_rate(step, 10, 0.1, warmup=0.2) for step in range(1, 11)]
    late = [bake.learning_rate(step, 10, 0.1, warmup=0.99) for step in range(1, 11)]
    assert usual[:2] == [0.05, 0.1] and usual[1:] == sorted(usual[1:])[::-1] and usual[-1] > 0
    assert late == sorted(late) and late[-1] == 0.1
    assert 0 < bake.learning_rate(1, 10, 0.1, warmup=0) < 0.1

# --------------------------------------------------------------------- data: rows and prompts
SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Ho"}

def user(content):
    return {"role": "user", "content": content}

def dialog(*turns, **more):
    return {"messages": list(turns)} | more

class Base:
    """What Chat asks of a model."""
    def __init__(self, folder):
        self.config = transformers.AutoConfig.from_pretrained(folder)
        self.generation_config = transformers.GenerationConfig(eos_token_id=256)

    def get_input_embeddings(self):
        return torch.nn.Embedding(272, 1)

@functools.cache
def chat_for(folder, template=None):
    """The Chat of the tokenizer in the folder, with another template if one is given."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template or tokenizer.chat_template
    return bake.Chat(tokenizer, Base(folder), {})

def built(rows, chat, *flags):
    """Rows -> examples."""
    places = [(f"f:{i}", json.dumps(row)) for i, row in enumerate(rows, 1)]
    return bake.build_examples(places, chat, parse("x", *flags))

# ----------------------------------------------------------------------------------------- sampling
class Sampler:
    """A model that records its generate calls, with what sampling needs beside it."""
    def __init__(self, folder, *flags):
        flags = ("--prompt", "Say much.", "--temperature", "0", "--max-new-tokens", "6", *flags)
        self.model, _, self.args = loaded(folder, *flags)
        self.chat = bake.Chat(AutoTokenizer.from_pretrained(folder), self.model, {})
        self.calls = []
        self.generate = self.model.generate
        self.model.generate = self.record

    def record(self, **arguments):
        if "output_logits" not in arguments:  # that is the check of the padding
            self.calls.append(arguments)
        return self.generate(**arguments)

    def run(self, rows, out):
        places = [(f"f:{i}", json.dumps(row)) for i, row in enumerate(rows, 1)]
        self.examples = bake.build_examples(places, self.chat, self.args)
        return bake.sample_responses(self.model, self.chat, self.examples,
                                     prefix_of(self.model, self.examples), out, self.args)

def sides(examples):
    return [(e.teacher_prompt, e.student_prompt, e.response) for e in examples]

def test_sampling_in_one_call(folders, tmp_path):
    """Each (row, trajectory) gets what it would get alone, and goes back to its row. The file is
    data, with its ids."""
    s = Sampler(folders())
    s.args.trajectories = 2  # greedy ones are alike: it was 1
    rows = [{"prompt": "A long question, isn't it?"}, {"prompt": "Hi"},
            {"prompt": "Q", "completion": "A"}, {"prompt": "Why so?"}]
    given, *sampled = s.run(rows, tmp_path)
    assert len(s.calls) == 1 and given is s.examples[2]
    assert sorted(e.where for e in sampled) == ["f:1", "f:1", "f:2", "f:2", "f:4", "f:4"]
    with bake.teacher_mode(s.model):
        for e in sampled:
            row = int(e.where[2:]) - 1
            assert e.teacher_prompt == s.examples[row].teacher_prompt
            alone = bake.generate(s.model, s.chat, [e.teacher_prompt], Prefix(), 6, 0)
            assert alone == [e.response]
    again = built(bake.read_lines(tmp_path / "trajectories.jsonl"), s.chat)
    assert sides(again) == sides(sampled)

def test_sampled_ids_are_cut_after_the_stop_and_never_given_one(folders, tmp_path):
    s = Sampler(folders(), "--trajectories", 1)
    said = {"a": [5, 6, 256, 9, 256, 256], "b": [256] * 6, "c": [1, 2, 3, 4, 5, 6]}

    def generate(input_ids, **arguments):
        if "output_logits" in arguments:
            return s.generate(input_ids=input_ids, **arguments)
        letters = [s.chat.tokenizer.decode(row[-3]) for row in input_ids]
        new = torch.tensor([said[letter] for letter in letters], device=DEVICE)
        return torch.cat([input_ids, new], 1)

    s.model.generate = generate
    out = s.run([{"prompt": "a"}, {"prompt": "bb"}, {"prompt": "ccc"}], tmp_path)
    expected = [("f:1", [5, 6, 256]), ("f:2", [256]), ("f:3", [1, 2, 3, 4, 5, 6])]
    assert sorted((e.where, e.response) for e in out) == expected

def test_a_model_that_reads_padding_is_not_sampled(folders, tmp_path):
    rows = [{"prompt": "Hi"}, {"prompt": "How is that?"}]
    refused("other logits behind padding", Sampler(folders("Rwkv")).run, rows, tmp_path)

def test_sampling_takes_nothing_from_the_checkpoint(tmp_path):
    """A hostile generation_config does not leak in: first tokens are as the logits say. Its stop
    tokens count."""
    hostile = {"top_k": 1, "top_p": 0.3, "repetition_penalty": 1.7, "max_length": 3,
               "do_sample": True, "num_beams": 2, "num_return_sequences": 2,
               "forced_eos_token_id": 7, "min_length": 4,
               "suppress_tokens": [1, 2], "eos_token_id": [256, 9]}
    folder = make_model(tmp_path / "model")
    write(Path(folder) / "generation_config.json", json.dumps(hostile))
    s = Sampler(folder, "--trajectories", 64, "--temperature", 1.5)
    assert s.chat.stops[0] == 256 and set(s.chat.stops) == {256, 9}
    said = [e.response for e in s.run([{"prompt": "Hi"}] * 4, tmp_path)]
    counts = np.bincount([ids[0] for ids in said], minlength=272)
    with torch.no_grad(), s.model.disable_adapter():
        ids = torch.tensor([s.examples[0].teacher_prompt], device=DEVICE)
        logits = s.model(input_ids=ids).logits[0, -1]
    p = (logits / 1.5).softmax(-1).cpu().numpy()
    likely = p.argsort()[-5:]
    assert np.abs(counts[likely] / len(said) - p[likely]).max() < 0.12 and (counts > 0).sum() > 5
    longest = max(said, key=len)
    assert len(longest) == 6 and longest[-1] != 7
    assert not any(9 in ids[:-1] for ids in said)

def test_a_response_leaves_room_for_the_student(folders, tmp_path):
    """Whose prompt may be the longer one."""
    s = Sampler(folders(), "--student-prompt", "Say so very much.", "--trajectories", 1)
    (tmp_path / "any").mkdir()
    rows = [{"prompt": "Hi"}, {"prompt": "Hi there."}]
    longest = max(len(e.student_prompt) for e in s.run(rows, tmp_path / "any"))
    s.chat.limit = longest + 4
    said = s.run(rows, tmp_path)
    assert max(len(e.response) for e in said) == 4
    assert all(len(e.student_prompt + e.response) <= s.chat.limit for e in said)

def test_samples_are_written_a_hundred_times_at_most(folders, tmp_path, monkeypatch):
    """As the file is written whole: with each batch of a short run, and in the end all of it."""
    s = Sampler(folders(), "--batch-size", 1)
    written = []
    monkeypatch.setattr(bake, "generate", lambda _, __, prompts, *___: [[7]] * len(prompts))
    monkeypatch.setattr(bake, "write_lines", lambda path, rows: written.append(len(rows)))
    for trajectories, expected in ((12, [4, 8, 12]), (4 * 251, [*range(4, 1004, 12), 1004])):
        written.clear()
        s.args.trajectories = trajectories
        s.run([{"prompt": "Hi"}], tmp_path)
        assert written == expected

def test_interrupted_sampling_goes_on_behind_the_last_batch(folders, tmp_path):
    """And no batch repeats the samples of another, though all prompts are alike here."""
    s = Sampler(folders(), "--trajectories", 12, "--batch-size", 1, "--temperature", 1)
    file = tmp_path / "trajectories.jsonl"
    s.run([{"prompt": "What is that?"}], tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(s.calls) == 3 and len(lines) == 12 and len(set(lines)) > 5
    (tmp_path / "other").mkdir()
    s.args.seed = 1  # which shares no sample with seed 0, as a seed has but 32 bits on the CPU
    s.run([{"prompt": "What is that?"}], tmp_path / "other")
    other = (tmp_path / "other" / "trajectories.jsonl").read_bytes().splitlines(keepends=True)
    assert len(set(lines) & set(other)) <= 2
    s.args.seed = 0
    for batches_done in (1, 2, 3):
        file.write_bytes(b"".join(lines[:4 * batches_done]))
        s.calls.clear()
        s.run([{"prompt": "What is that?"}], tmp_path)
        assert file.read_bytes() == b"".join(lines) and len(s.calls) == 3 - batches_done

# ------------------------------------------------------------------------------- a run, end to end
@pytest.fixture(scope="session")
def command(folders, tmp_path_factory):
    """command(out, more) -> the command line of a short run: --model FOLDER --data FILE ..."""
    prompt = SYSTEM | {"content": "Answer like a pirate, please: *arr*\n<b>&</b> ```x```"}
    rows = [dialog(prompt, user(f"Question {i}, what now?")) for i in range(12)]
    rows[0]["completion"] = "# Arr\r\n</pre>"
    folder = tmp_path_factory.mktemp("data")
    data = write(folder / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    fixed = ("--dtype float32 --trajectories 2 --max-new-tokens 12 --epochs 4 --lr 1e-2 "
             "--eval-fraction .25").split()

    def line(out, more=""):
        return ["--model", folders(), "--data", data, *fixed,
                "--out", str(out), *more.split()]
    return line

@pytest.fixture(scope="session")
def run(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a" / "b"
    return out, bake.main(command(out))

def files_of(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

def read_log(out):
    return [json.loads(line) for line in open(out / "metrics.jsonl")]

def examples_of(out):
    """The examples of a finished run, from its own files."""
    read = bake.prepare(out, None, None)
    rows = {json.dumps(e.messages): e for e in read}
    examples = [e for e in read if e.response]
    for row in bake.read_lines(out / "trajectories.jsonl"):
        example = copy.copy(rows[json.dumps(row["messages"])])
        example.response = row["ids"]
        examples.append(example)
    return examples

def test_a_run_bakes(run):
    """Held-out KL is halved, and is what plain passes find in what PEFT loads from the folder."""
    out, report = run
    assert report == json.loads((out / "report.json").read_text())
    assert report["kl_after"] < 0.5 * report["kl_before"]
    assert report["top1_after"] > report["top1_before"]
    assert report["recovered"] == pytest.approx(1 - report["kl_after"] / report["kl_before"])
    assert len(report["questions"]) == 3
    assert {name for name in files_of(out)} - {".lock"} == set(
        "README.md adapter_config.json adapter_model.safetensors args.json chat_template.jinja "
        "examples.jsonl metrics.jsonl report.json tokenizer.json tokenizer_config.json "
        "trajectories.jsonl".split())
    log = read_log(out)
    assert [entry["step"] for entry in log] == list(range(13))
    assert log[-1]["eval_kl"] == report["kl_after"] and log[0]["eval_kl"] == report["kl_before"]
    assert {"kl", "lr", "grad_norm"} <= log[1].keys()
    assert len(list(open(out / "trajectories.jsonl"))) == 11 * 2

    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["bias"], config["modules_to_save"]) == (16, "none", None)
    assert config["target_modules"] == sorted(config["target_modules"])  # the same in every run
    names = safetensors.torch.load_file(out / "adapter_model.safetensors")
    assert names and all(re.search(r"lora_[AB]\.weight$", name) for name in names)
    held_out = [e for e in examples_of(out) if e.held_out]
    assert len(held_out) == report["held_out_responses"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out).to(DEVICE)
    with torch.no_grad():
        kl = loop_kl(model, held_out).mean().item()
    assert kl == pytest.approx(report["kl_after"], abs=1e-5)
    assert AutoTokenizer.from_pretrained(out).chat_template == PLAIN

def test_less_memory_is_the_same_bake(run, command, tmp_path, monkeypatch):
    """And layers that run twice share no prefix, though here it would pay."""
    monkeypatch.setitem(bake.PAYS, DEVICE, 1)
    other = bake.main(command(tmp_path, "--micro-batch-size 3 --gradient-checkpointing"))
    assert other["kl_after"] == pytest.approx(run[1]["kl_after"], abs=1e-3)

def test_the_same_command_again_says_that_it_is_done(run, command, tmp_path, capsys, monkeypatch):
    """A finished run is neither run again nor overwritten; a refused one leaves no file behind."""
    out, report = run
    _, folder, _, data, *_ = command(out)
    before = files_of(out)
    rows = Path(data).read_bytes()
    monkeypatch.setattr(bake, "load_model", None)
    assert bake.main(command(out)) == report and "is done" in capsys.readouterr().out
    monkeypatch.undo()
    bad = write(tmp_path / "bad.jsonl", '{"prompt": "<|end|>"}\n{"prompt": 3}\n')
    for where, more, reason in [
            (out, "--lr .5", "with lr 0.01, found 0.5"),
            (out, "--prompt x", "with prompt '', found 'x'"),
            (folder, "", "files of something else"), (data, "", "to be a folder"),
            (tmp_path / "a", f"--prompt P --data {bad}", "2 of 2 rows .*l:1: expected text"),
            (tmp_path / "a", f"--prompt P --data {bad} --skip-bad-rows", "2 of 2 rows .* cannot"),
            (tmp_path / "a", "--data missing", "a file at --data missing, found FileNotFound")]:
        refused(reason, bake.main, command(where, more))
    assert not list((tmp_path / "a").iterdir())
    write(Path(data), rows + b"\n")
    refused("with data_sha256", bake.main, command(out))
    write(Path(data), rows)
    with filelock.FileLock(out / ".lock"):
        refused("no other run to be at work", bake.main, command(out))
    assert files_of(out) == before

def test_what_a_row_became_is_read_back(command, tmp_path, monkeypatch):
    """A run that goes on renders and tokenises nothing, so no template or date can change it."""
    monkeypatch.setattr(bake, "sample_responses", None)
    refused("not callable", bake.main, command(tmp_path), error=TypeError)
    before = (tmp_path / "examples.jsonl").read_bytes()
    monkeypatch.undo()
    monkeypatch.setattr(bake, "build_examples", None)
    bake.main(command(tmp_path))
    assert (tmp_path / "examples.jsonl").read_bytes() == before

def test_law_9_training_goes_on_where_it_was(command, run, tmp_path, monkeypatch):
    """An epoch, a crash (full disk, Ctrl-C, NaN) in each later one: the same bits at the end."""
    write_whole = bake.write_whole
    train_step = bake.train_step
    steps = []

    def write_half(path, data):
        if path.name == "checkpoint.pt" and path.exists():
            path.with_name("checkpoint.pt.part").write_bytes(data[:9])
            raise OSError(28, "No space left on device")
        write_whole(path, data)

    def step(*arguments):
        steps.append(len(steps))
        if len(steps) == 2:
            raise KeyboardInterrupt("in epoch 2")
        return train_step(*arguments) * (math.nan if len(steps) == 4 else 1)

    monkeypatch.setattr(bake, "write_whole", write_half)
    refused("No space left", bake.main, command(tmp_path), error=OSError)
    monkeypatch.setattr(bake, "write_whole", write_whole)
    monkeypatch.setattr(bake, "train_step", step)
    refused("in epoch 2", bake.main, command(tmp_path), error=KeyboardInterrupt)
    refused(r"step 5: KL nan, gradient norm nan, in .*rows.jsonl:\d+", bake.main, command(tmp_path))
    _, _, log = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert [entry["step"] for entry in log] == [0, 1, 2, 3]
    assert bake.main(command(tmp_path)) == run[1]
    for name in ("adapter_model.safetensors", "metrics.jsonl"):
        assert (tmp_path / name).read_bytes() == (run[0] / name).read_bytes()

@pytest.mark.parametrize("stopped_in", ["fsync", "replace"])
def test_law_9_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch, stopped_in):
    """Whatever stops the writing, before it is on the disk the old file stands."""
    bake.write_whole(tmp_path / "file", "old")
    monkeypatch.setattr(bake.os, stopped_in, lambda *_: 1 / 0)
    refused("", bake.write_whole, tmp_path / "file", "new", error=ZeroDivisionError)
    assert (tmp_path / "file").read_text() == "old"

def test_damaged_files_are_named_and_made_again(command, run, tmp_path, monkeypatch):
    """One line says which file to delete; then the same command ends in the same bits."""
    monkeypatch.setattr(bake, "write_results", None)
    refused("not callable", bake.main, command(tmp_path), error=TypeError)
    monkeypatch.undo()
    for name in bake.PHASES:
        path = tmp_path / name
        whole = path.read_bytes()
        for damaged in (whole[:-20], b""):
            path.write_bytes(damaged)
            refused(f"{name} as it was written: delete it", bake.main, command(tmp_path))
        path.write_bytes(whole)
    made = files_of(tmp_path)
    for name in bake.PHASES:
        (tmp_path / name).unlink()
        if name in bake.PHASES[:2]:  # what was made of it is not taken for what is made of it now
            monkeypatch.setattr(bake, "teacher_targets", None)
            refused("not callable", bake.main, command(tmp_path), error=TypeError)
            assert not (tmp_path / "checkpoint.pt").exists()
            monkeypatch.undo()
        assert bake.main(command(tmp_path)) == run[1]
        for path in tmp_path.iterdir():
            path.unlink()
        for path, data in made.items():
            (tmp_path / path).write_bytes(data)
    assert bake.main(command(tmp_path)) == run[1]
    for name in ("adapter_model.safetensors", "report.json"):
        (tmp_path / name).unlink()
        assert bake.main(command(tmp_path)) == run[1]
        assert (tmp_path / name).read_bytes() == (run[0] / name).read_bytes()
    (tmp_path / "adapter_model.safetensors").unlink()
    monkeypatch.setattr(bake, "bake", None)
    refused("not callable", bake.main, command(tmp_path), error=TypeError)
    assert not (tmp_path / "report.json").exists()  # or half an adapter would be taken for done
    monkeypatch.undo()
    write(tmp_path / "report.json", "{")
    bake.main(command(tmp_path))
    write(tmp_path / "report.json", "{")
    refused("report.json as it was written: delete it", bake.main, command(tmp_path))
    write(tmp_path / "args.json", "null")
    refused("args.json as it was written: delete the folder", bake.main, command(tmp_path))

def test_an_adapter_finds_its_base_from_anywhere(folders, monkeypatch):
    folder = Path(folders())
    monkeypatch.chdir(folder.parent)
    model, _, _ = loaded(folder.name)
    assert model.peft_config["default"].base_model_name_or_path == str(folder)

@pytest.mark.parametrize("flags", [
    ["--epochs", 0], ["--lr", "nan"], ["--lr", "inf"], ["--template-kwargs", "{"],
    ["--batch-size", -1], ["--seed", 2 ** 64], ["--epochs", 10 ** 12], ["--eval-fraction", 1]])
def test_flags_out_of_bounds(flags):
    refused(".", parse, "x", *flags)

def test_an_adapter_that_loads_otherwise_is_refused(folders, tmp_path, monkeypatch):
    """As where PEFT maps the names of a model's weights otherwise. Here it reads none of them."""
    model, _, _ = loaded(folders())
    fresh = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    monkeypatch.setattr(model, "load_adapter", lambda _, name, **__: model.add_adapter(name, fresh))
    refused("to be what was trained", bake.write_results, model, chat_for(folders()), {}, tmp_path)
    assert not (tmp_path / "report.json").exists()

def test_what_is_shown_cannot_steer_a_terminal(capsys):
    bake.show("é\x1b", "a\n\tb\x1b[2J\x9b\u202ec é")
    assert capsys.readouterr().out == "--- é\\x1b\na\n\tb\\x1b[2J\\x9b\\u202ec é\n"

def test_another_model_under_the_same_name_is_another_run(command, tmp_path):
    line = command(tmp_path / "model" / "out", "--epochs 1 --trajectories 1")
    line[1] = make_model(tmp_path / "model")
    assert bake.main(line) == bake.main(line)  # OUT may stand in the model's folder
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # written again, at another time
    refused("with model_files", bake.main, line)
    bake.main([*line, "--out", str(tmp_path / "second"), "--micro-batch-size", "1"])
    write(tmp_path / "model" / "adapter_config.json", "{}")
    refused("found an adapter in --model .* merge it", loaded, tmp_path / "model")

@pytest.mark.parametrize("error, said", [
    (MemoryError(), "out of memory: .*smaller --micro-batch-size"),
    (torch.OutOfMemoryError("CUDA"), "out of memory: .*CUDA.*smaller --micro-batch-size"),
    (OSError(28, "No space left"), "stopped by .*No space left.* the same command goes on")])
def test_what_stops_the_program_is_one_line(command, tmp_path, monkeypatch, error, said):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr(torch.optim, "AdamW", stop)
    monkeypatch.setattr(sys, "argv", ["bake.py", *command(tmp_path, "--trajectories 1")])
    refused(said, functools.partial(runpy.run_path, bake.__file__, run_name="__main__"))

@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("phase", ["generate", "make_targets", "held_out_scores", "side_by_side"])
def test_a_folder_lost_under_a_run(command, tmp_path, monkeypatch, phase, anew):
    """Nothing more is written where it was, in no phase, though the same command began anew."""
    plain = getattr(bake, phase)

    def lose(*arguments):
        monkeypatch.undo()
        args = (tmp_path / "args.json").read_text()
        shutil.rmtree(tmp_path)
        if anew:
            tmp_path.mkdir()
            write(tmp_path / "args.json", args)
            write(tmp_path / ".lock", "")
        return plain(*arguments)

    monkeypatch.setattr(bake, phase, lose)
    refused("found it removed or made anew", bake.main, command(tmp_path, "--trajectories 1"))
    assert not tmp_path.exists() or set(os.listdir(tmp_path)) == {"args.json", ".lock"}

def test_the_adapter_is_on_the_disk_before_its_report(folders, tmp_path, monkeypatch):
    model, _, _ = loaded(folders())
    synced = []
    monkeypatch.setattr(bake.os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    bake.write_results(model, chat_for(folders()), {}, tmp_path)
    names = ["adapter_config.json", "adapter_model.safetensors", "report.json"]
    *adapter, report = [(tmp_path / name).stat().st_ino for name in names]
    assert set(synced[:2]) == set(adapter) and synced[2:] == [report]

def test_out_of_memory_is_not_taken_for_something_else():
    for error in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(error), bake.expect("anything"):
            raise error

def test_what_a_library_says_is_one_line():
    with pytest.raises(SystemExit, match="^expected this, found ValueError: a b$"):
        with bake.expect("this"):
            raise ValueError("a\n  b\n")

def test_a_held_out_kl_that_is_no_number(command, tmp_path, monkeypatch):
    def evaluate(model, head, examples, size):
        return [(math.nan, 0)] * len(examples)

    monkeypatch.setattr(bake, "evaluate", evaluate)
    refused("a held-out KL, found nan: .* --dtype float32", bake.main, command(tmp_path))

def test_a_full_disk_while_saving(folders, tmp_path, monkeypatch):
    """Of which safetensors has an error of its own."""
    model, _, _ = loaded(folders())

    def full(*_, **__):
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(peft.peft_model, "safe_save_file", full)
    refused("to save the adapter in .* No space left", bake.write_results, model,
            chat_for(folders()), {}, tmp_path)

def test_ctrl_c_ends_in_one_line(command, tmp_path):
    program = [sys.executable, bake.__file__, *command(tmp_path, "--epochs 500")]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(2)
    said = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in said
    assert said.endswith("stopped by KeyboardInterrupt(): the same command goes on from what "
                         "--out holds\n")

KILLER = """
import os, sys, threading, time, bake
def phase(*args):  # the clock starts with the phase, and it is killed at its end at the latest
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), 9)).start()
    plain(*args)
    time.sleep(60)
plain = getattr(bake, sys.argv[1])
setattr(bake, sys.argv[1], phase)
bake.main(sys.argv[3:])
"""

@pytest.mark.skipif(DEVICE != "cpu", reason="bit-identity is promised on the CPU")
def test_law_9_a_run_survives_kill_9_at_any_moment(command, tmp_path):
    more = "--batch-size 2 --trajectories 8 --epochs 2"
    out = tmp_path / "killed"
    rng = np.random.default_rng(0)
    seen = set()
    phases = {"sample_responses": 0.4, "teacher_targets": 0.2, "train": 0.6, "write_results": 0.1}
    for phase, longest in phases.items():
        for _ in range(3):
            line = [phase, str(rng.random() * longest), *command(out, more)]
            done = subprocess.run([sys.executable, "-c", KILLER, *line], cwd=ROOT,
                                  capture_output=True, text=True)
            assert "Traceback" not in done.stderr, done.stderr
            seen.add(str(sorted(files_of(out))))
    assert len(seen) >= 3, seen
    assert bake.main(command(out, more)) == bake.main(command(tmp_path / "whole", more))
    for name in ("adapter_model.safetensors", "trajectories.jsonl", "metrics.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name

@pytest.mark.parametrize("before, after, questions, note", [
    (.5, .6, 9, "the bake failed"), (.5, .45, 9, "little was"), (.5, .05, 9, None),
    (.0005, .0001, 9, "does nothing"), (.5, .1, 2, "fewer than 5"), (.5, .1, 0, "fewer than 5")])
def test_a_bake_that_failed_says_so(before, after, questions, note):
    examples = [RowExample([], [], [1], where="", messages=[SYSTEM], question="q")] * questions
    log = []
    for kl in (before, after):
        log.append({"questions": {f"q{i}": [kl, 0.5] for i in range(questions)}})
    report = bake.make_report(examples, examples, log)
    notes = report["notes"]
    assert len(notes) == (note is not None) and (note or "") in "".join(notes).lower()
    assert (report.get("recovered") is None) == (before < 1e-3 or questions == 0)

@given(seed=st.integers(0, 99), n=st.integers(2, 30))
def test_standard_errors_against_numpy(seed, n):
    """Of means over questions; that of the share recovered is what a bootstrap over them finds."""
    rng = np.random.default_rng(seed)
    before = 0.3 * rng.uniform(0.5, 1.5, (n, 2))
    after = before * rng.uniform(0.1, 0.2, (n, 2))
    sides = [{f"q{i}": pair.tolist() for i, pair in enumerate(side)} for side in (before, after)]
    report = bake.held_out_numbers(*sides)
    for name, values in (("kl_before", before[:, 0]), ("top1_after", after[:, 1])):
        assert report[name] == pytest.approx(values.mean())
        assert report[f"{name}_error"] == pytest.approx(np.std(values, ddof=1) / n ** 0.5)
    if n >= 20:
        draws = rng.integers(0, n, (2000, n))
        shares = after[draws, 0].mean(1) / before[draws, 0].mean(1)
        assert report["recovered_error"] == pytest.approx(shares.std(), rel=0.2)
    one = bake.held_out_numbers({"q": [0.5, 0.5]}, {"q": [0.1, 0.9]})
    assert one["recovered"] == pytest.approx(0.8) and one["recovered_error"] is None

# ------------------------------------------------------------------------- Part 1, and the README
def blocks_of(section):
    """The indented blocks of a section of the README, as texts."""
    text = "## \n" + (ROOT / "README.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", body, re.M)
    return [re.sub("^    ", "", block, flags=re.M).strip() + "\n" for block in blocks]

def test_law_11_part_1_stands_alone(run, folders, tmp_path, monkeypatch):
    """Cut out with its imports and executed in the README's loop, it gets what the run got."""
    source = (ROOT / "bake.py").read_text()
    imports = re.search(r"# Part 1 needs these alone.\n(.*?)\n# Part 2", source, re.S)[1]
    part_1 = re.search(r"\n(# ===== Part 1.*?)# ===== Part 2", source, re.S)[1]
    assert part_1.count("\n") <= 300
    loop, = blocks_of("In your own code")
    for usual, here in (("range(3)", "range(4)"), ("peak=1e-3", "peak=1e-2")):
        assert usual in loop
        loop = loop.replace(usual, here)
    loop = re.sub("^from bake import.*\n", "", loop, flags=re.M)

    out, report = run
    read = examples_of(out)
    printed = []
    monkeypatch.setitem(sys.modules, "part_1", type(sys)("part_1"))
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "part_1", "print": lambda *values: printed.append(values)}
    exec(imports + part_1, space)
    made = [space["Example"](e.teacher_prompt, e.student_prompt, e.response) for e in read]
    space["examples"] = [x for x, e in zip(made, read) if not e.held_out]
    space["held_out"] = [x for x, e in zip(made, read) if e.held_out]
    space["model"], _ = bake.load_model(parse(folders(), "--rank", 16))
    exec(loop, space)

    before, *steps, after = printed
    log = read_log(out)
    assert np.mean(before[1], 0)[0] == pytest.approx(report["kl_before"], rel=1e-6)
    assert np.mean(after[1], 0)[0] == pytest.approx(report["kl_after"], rel=1e-4)
    assert [step for step, _, _ in steps] == [entry["step"] for entry in log[1:]]
    assert [kl for _, kl, _ in steps] == pytest.approx([e["kl"] for e in log[1:]], rel=1e-4)
    norms = [e["grad_norm"] for e in log[1:]]
    assert [norm for *_, norm in steps] == pytest.approx(norms, rel=1e-4)
