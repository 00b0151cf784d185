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

Models are tiny, random and made here: no network. Hypothesis draws the structure, seeded generators
the tensors. `make test` runs them all, on CUDA if there is one."""
import copy
import functools
import json
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
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
from bake import Example, Prefix, Refused, RowExample

settings.register_profile("bake", settings.get_profile("ci"), max_examples=40)  # no deadline, and
settings.load_profile("bake")  # derandomised
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(bake.__file__).parent

# -------------------------------------------------------------------------- tiny models, made here
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]  # ids 256 to 260
TURN = "<|{{ m.role }}|>{{ m.content | trim }}<|end|>"


def template_of(turn):
    """A chat template: `turn` for each message m, and then the start of an answer."""
    start = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + start


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
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 8},
    "GPT2": {},
    "GPTNeoX": {},
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 0.5},
    "HyperCLOVAX": {"logits_scaling": 0.5},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 8},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "Rwkv": {"attention_hidden_size": 32},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2,
               "chunk_size": 8},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                 "mamba_chunk_size": 8},
}
NO_CACHE = ["Rwkv"]  # every prompt is read in full
RECURRENT = ["Rwkv", "Mamba2", "FalconH1"]


def make_model(folder, family="Llama", tokenizer=None):
    """A random model, scaled up until what it predicts is far from uniform, with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE | FAMILIES[family])
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


def test_the_loss_under_autocast():
    """The head computes in bf16 there; the KL stays in fp32 and its gradient in the states' type."""
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
        return {key: n for key, n in counts.items() if key[:6] == "aten::" and not moves.search(key)}

    assert operators(1, 16) == operators(8, 2)


# ------------------------------------------------------------------------ gradients through the model
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
    """One read of what a batch shares, behind which each row is shorter; not below the threshold."""
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
    model.config.use_cache = False
    widths.clear()
    bake.batch_kl(model, head, examples)
    assert len(widths) == 1


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
@pytest.mark.parametrize("flags", [[], ["--gradient-checkpointing"]])
def test_law_6_an_empty_difference_is_nothing(folders, family, flags, tmp_path):
    """Equal prompts: KL and gradient 0, though GPT-2 and OPT have dropout and were left training."""
    args = parse(folders(family), *flags, "--lr", 1e-9)
    model, head = bake.load_model(args)
    examples = make_examples([(0, 5, 3), (0, 9, 6), (0, 3, 1)], shared=0)
    for e in examples:
        e.student_prompt = e.teacher_prompt
    model.train()
    fill_targets(model, examples, tmp_path, Prefix())
    assert model.training  # the mode was restored
    model.eval()
    for e in examples:
        e.where = "row"
    kl = bake.batch_kl(model, head, examples)
    grads = torch.autograd.grad(kl.sum(), lora(model))
    assert (kl == 0).all() and all((grad == 0).all() for grad in grads)
    log = bake.train(model, head, examples, [], args, tmp_path)
    assert all(entry["kl"] < 1e-7 for entry in log[1:]) and len(log) == 4


def all_bits(model):
    return {name: t.cpu().numpy().tobytes() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_laws_7_and_8_families(folders, family, tmp_path, capsys):
    """Prefix-cached is uncached, for targets and sampling; training moves LoRA and no other bit."""
    modules = "in_proj" if family in ("Mamba2", "FalconH1") else "all-linear"
    model, head, args = loaded(folders(family), "--target-modules", modules)
    examples = make_examples([(9, 4, 5), (3, 9, 12), (6, 2, 1)], shared=12)
    prefix = prefix_of(model, examples)
    assert prefix.length == (0 if family in NO_CACHE else 12)
    assert ("are read in full" in capsys.readouterr().out) == (family in NO_CACHE)
    plain = fill_targets(model, examples, tmp_path, Prefix())
    fill_targets(model, examples, tmp_path, prefix)
    cached = fill_targets(model, examples, tmp_path, prefix)  # its use has not changed the cache
    assert_close(cached, plain, atol=1e-4, rtol=1e-4)
    assert_close(bake.batch_kl(model, head, examples), loop_kl(model, examples), atol=1e-5, rtol=1e-4)
    if family not in NO_CACHE:  # RWKV has no mask for padding
        chat = bake.Chat(model, args)
        prompts = [e.teacher_prompt for e in examples]
        with bake.teacher_mode(model):
            alone = [bake.generate(model, chat, [p], Prefix(), 8, 0)[0] for p in prompts]
            assert bake.generate(model, chat, prompts, prefix, 8, 0) == alone
    before = all_bits(model)
    for e in examples:
        e.where = "row"
    bake.train(model, head, examples, [], args, tmp_path)
    after = all_bits(model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if "lora_" in name}
    assert changed == {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_bases(folders, dtype, tmp_path):
    model, head, _ = loaded(folders(), dtype=dtype)
    examples = make_examples([(3, 4, 2), (1, 9, 7)])
    fill_targets(model, examples, tmp_path)
    kl = bake.batch_kl(model, head, examples)
    for tensor in (kl, *torch.autograd.grad(kl.sum(), lora(model))):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()
    assert_close(kl, loop_kl(loaded(folders())[0], examples), atol=0.1, rtol=0.1)


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
