"""Tests of bake.py, each named after a law it holds. `make test` runs them, on CUDA if there is one. Models
are tiny, random and made here: no network. Hypothesis draws the structure, seeded generators the tensors."""
import copy, fcntl, functools, hashlib, io, json, math, re, runpy, signal  # noqa: E401
import subprocess, sys, time, timeit  # noqa: E401
from collections import defaultdict
from pathlib import Path

import numpy as np, peft, pytest, safetensors.torch, tokenizers, torch, transformers  # noqa: E401
from hypothesis import example, given, settings, strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer

import bake
from bake import Args, Example

settings.register_profile("bake", settings.get_profile("ci"), max_examples=40)  # derandomized, no deadline
settings.load_profile("bake")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ----------------------------------------------------------------------- tiny models, made here
each = lambda turn: (  # a chat template: `turn` for each message m, and then the start of an answer
    "{% for m in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
TURN = "<|{{ m.role }}|>{{ m.content | trim }}<|end|>"
PLAIN = each(TURN)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]  # ids 256 to 260
user = lambda content: {"role": "user", "content": content}
lora = lambda model: [p for p in model.parameters() if p.requires_grad]
all_ids = lambda examples: [(e.teacher, e.student, e.response) for e in examples]

def make_tokenizer(template=PLAIN, pad="<|pad|>", bos=None):
    vocab = {s: i for i, s in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + SPECIAL)}
    return GPT2Tokenizer(vocab, [], eos_token="<|end|>", pad_token=pad, bos_token=bos, unk_token=None,
                         add_bos_token=bos, extra_special_tokens=SPECIAL, chat_template=template)

SIZE = dict(vocab_size=272, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=512, pad_token_id=260, eos_token_id=256)
FAMILIES = {
    "Llama": {}, "Qwen2": {}, "Qwen3": dict(head_dim=8), "Mistral": dict(sliding_window=8), "GPT2": {},
    "GPTNeoX": {}, "Cohere": dict(logit_scale=0.5), "Granite": dict(logits_scaling=0.5),
    "Gemma2": dict(head_dim=8, final_logit_softcapping=3.0, sliding_window=8),
    "OPT": dict(ffn_dim=64, word_embed_proj_dim=16), "Rwkv": dict(attention_hidden_size=32),
    "Mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1, expand=2, chunk_size=8)}

def make_model(folder, family="Llama", tokenizer=make_tokenizer()):
    """A random model, scaled up until what it predicts is far from uniform, with its tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZE | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data *= 4 if p.dim() == 2 else 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return functools.cache(lambda family="Llama": make_model(tmp_path_factory.mktemp(family), family))

def parse(model, *flags, **more):
    args = bake.parse_args([*f"--model {model} --data no --dtype float32 --rank 4".split(), *map(str, flags)])
    return Args(**vars(args) | more)

def loaded(folder, *flags, **more):
    """-> model, head, arguments. The adapters do something: B is not zero."""
    args = parse(folder, *flags, **more)
    model, head = bake.load_model(args)
    torch.manual_seed(0)
    for p in [p for name, p in model.named_parameters() if "lora_B" in name]:
        torch.nn.init.normal_(p, std=0.05)
    return model, head, args

def make_examples(sizes, seed=0, shared=6):
    """[(teacher extra, student, response)] lengths -> examples of random ids, alike at the start."""
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(0, 256, n).tolist()
    start = ids(shared)
    return [Example(f"row {i}", [user(f"question {i}")], start + ids(u + x), ids(x), ids(y))
            for i, (u, x, y) in enumerate(sizes)]

def targets_for(model, examples, args, folder, prefix=None):
    path, prefix = Path(folder) / "targets", prefix or bake.shared_prefix(model, examples)
    path.unlink(missing_ok=True)
    return bake.teacher_targets(model, examples, prefix, path, args)

def loop_kl(model, examples, **keep):
    """The reference: sample by sample, no padding, no cache, full logits, teacher run again."""
    def log_probs(e, side):
        ids = torch.tensor([getattr(e, side) + e.response], device=model.device)
        logits = model(input_ids=ids, use_cache=False, **keep).logits[0, -len(e.response) - 1:-1]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    def kl(e):
        with torch.no_grad(), model.disable_adapter():
            p = log_probs(e, "teacher")
        return (p.exp() * (p - log_probs(e, "student"))).sum(-1).mean()
    return torch.stack([kl(e) for e in examples])

def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)

def refused(reason, call, *args, error=SystemExit):
    with pytest.raises(error, match=reason):
        call(*args)

# --------------------------------------------------------------------------- loss and training
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), chunk=st.integers(1, 60),
       temperature=st.sampled_from([0.5, 1.0, 2.0]), double=st.booleans(), seed=st.integers(0, 10 ** 6))
@example(lengths=[0, 0], chunk=3, temperature=1.0, double=True, seed=0)
@settings(max_examples=150)
def test_law_3_batched_kl_is_the_per_sample_loop(lengths, chunk, temperature, double, seed):
    """Any batch and chunk: the loop's loss and gradient. Padded rows hold NaN, so none reaches the head."""
    B, R, D, V, g = len(lengths), max(lengths) + 2, 8, 23, torch.Generator().manual_seed(seed)
    dtype, tight = (torch.float64, 1e-9) if double else (torch.float32, 1e-5)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=dtype).to(DEVICE)
    order = torch.rand(B, R, generator=g).argsort(1)  # real tokens anywhere in the row, not just at its start
    mask = (order < torch.tensor(lengths)[:, None]).to(DEVICE)
    W, weights, head = draw(V, D), draw(B), lambda hidden: 3 * torch.tanh(hidden @ W.T / 3)
    student, teacher = (draw(B, R, D).masked_fill(~mask[..., None], math.nan) for _ in range(2))
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    ours, loop = bake.batched_kl(a, teacher, mask, head, temperature, chunk), []
    for s, t, m in zip(b, teacher, mask):
        q, p = ((head(x[m]) / temperature).log_softmax(-1) for x in (s, t))
        loop.append((p.exp() * (p - q)).sum() / max(int(m.sum()), 1))
    for kl in (ours, torch.stack(loop)):
        (kl * weights).sum().backward()
    assert_close(ours, torch.stack(loop), atol=tight, rtol=tight)
    assert_close(a.grad[mask], b.grad[mask], atol=tight, rtol=tight)
    assert (a.grad[~mask] == 0).all()

llama64 = pytest.fixture(scope="session")(lambda folders: loaded(folders(), dtype="float64"))
@given(sizes=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=5), chunk=st.integers(1, 20),
       micro=st.integers(1, 5), order=st.randoms(use_true_random=False))
def test_laws_3_and_4_gradients_are_those_of_the_loop(llama64, sizes, chunk, micro, order, tmp_path_factory):
    """Through prefix cache, targets file and padding, and, clipped, in a step of any micro-batches."""
    model, head, args = llama64
    examples, args.micro_batch_size = make_examples(sizes, seed=len(sizes)), micro
    targets = targets_for(model, examples, args, tmp_path_factory.getbasetemp())
    order.shuffle(examples)
    ours = bake.batched_kl(*bake.both_states(model, examples, targets), head, chunk=chunk)
    loop, params = loop_kl(model, examples), lora(model)
    assert_close(ours, loop, atol=1e-9, rtol=1e-9)
    grads, expected = (torch.autograd.grad(kl.mean(), params) for kl in (ours, loop))
    assert_close(grads, expected, atol=1e-9, rtol=1e-7)
    assert len(grads) == 2 * 7 * 2  # A and B of 7 linear maps in 2 layers
    model.zero_grad()
    kl, norm = bake.train_step(model, head, examples, targets, params, args)
    assert_close(kl, loop.mean().detach(), atol=1e-9, rtol=1e-9)
    assert_close(norm, torch.stack([grad.norm() for grad in expected]).norm(), atol=1e-9, rtol=1e-7)
    assert_close([p.grad for p in params], [g / max(norm + 1e-6, 1) for g in expected], atol=1e-9, rtol=1e-7)

def test_law_5_forward_kl_in_nats():
    """.9 ln(.9/.5) + .1 ln(.1/.5) = .5290 - .1609 = .3681; the reverse KL would be .5108."""
    p, q = torch.tensor([[(.9, .1), (.5, .5), (.2, .8)], [(.5, .5), (.9, .1), (.2, .8)]]).double().log()
    assert np.allclose(bake.token_kl(student_logits=q, teacher_logits=p), [.3681, .5108, 0], atol=4.5e-5)

@given(n=st.integers(1, 5), V=st.integers(2, 50) | st.just(50_000), scale=st.sampled_from([0.0, 1.0, 30.0]),
       near=st.booleans(), half=st.booleans(), seed=st.integers(0, 10 ** 6))
@example(n=4, V=50_000, scale=1.0, near=True, half=True, seed=0)
def test_law_5_token_kl_against_numpy(n, V, scale, near, half, seed):
    """Never negative, 0 between a distribution and itself; in fp32 for bf16, in which sums lose digits."""
    dtype, rtol, atol = (torch.bfloat16, 1e-3, 1e-7) if half else (torch.float64, 1e-9, 1e-12)
    p, noise = torch.tensor(np.random.default_rng(seed).normal(size=(2, n, V)) * scale)
    p, q = p.to(dtype), (p + 0.2 * noise if near else noise).to(dtype)
    kl = bake.token_kl(q, p)
    P, Q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p.double().numpy(), q.double().numpy()))
    np.testing.assert_allclose(kl, (P * np.log(P / Q)).sum(-1), rtol=rtol, atol=atol)
    assert kl.dtype == torch.promote_types(dtype, torch.float32)
    assert (kl >= -atol).all() and (bake.token_kl(p, p) == 0).all()

def test_kernel_launches_do_not_depend_on_the_batch_size():
    """One batched call: with the same number of chunks, 8 samples take the operators of 1."""
    computes = re.compile("aten::(?!.*(copy|clone|empty|contiguous|reshape|view|as_strided|expand))")
    def operators(B, R):
        (student, teacher), mask = torch.randn(2, B, R, 8, requires_grad=True), torch.ones(B, R).bool()
        with torch.profiler.profile() as profile:
            bake.batched_kl(student, teacher, mask, lambda h: h @ torch.ones(8, 50), chunk=8).sum().backward()
        return {e.key: e.count for e in profile.key_averages() if computes.match(e.key)}
    assert operators(1, 16) == operators(8, 2)

@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
@pytest.mark.parametrize("flags", [[], ["--gradient-checkpointing"]])
def test_law_6_an_empty_difference_is_nothing(folders, family, flags, tmp_path):
    """Equal prompts: KL and gradient 0, though GPT-2 and OPT have dropout and were left in train()."""
    args = parse(folders(family), *flags, "--lr", 1e-9)
    model, head = bake.load_model(args)
    for e in (examples := make_examples([(0, 5, 3), (0, 9, 6), (0, 3, 1)], shared=0)):
        e.student = e.teacher
    model.train()
    targets = targets_for(model, examples, args, tmp_path, prefix=bake.NO_PREFIX)
    assert model.training and model.eval()  # the mode was restored
    kl = bake.batched_kl(*bake.both_states(model, bake.by_length(examples, 3)[0], targets), head)
    assert all((x == 0).all() for x in (kl, *torch.autograd.grad(kl.sum(), lora(model))))
    log = bake.train(model, head, examples, targets_for(model, examples, args, tmp_path), args, tmp_path)
    assert all(m["kl"] < 1e-7 for m in log[1:]) and len(log) == 4

@pytest.mark.parametrize("family", FAMILIES)
def test_laws_7_and_8_families(folders, family, tmp_path, capsys):
    """Prefix-cached is uncached, for training and sampling; training moves all of LoRA, and no other bit."""
    recurrent, modules = family in ("Mamba2", "Rwkv"), "in_proj" if family == "Mamba2" else "all-linear"
    model, head, args = loaded(folders(family), "--target-modules", modules)
    examples = make_examples([(9, 4, 5), (3, 9, 12), (6, 2, 1)], shared=12)
    prefix = bake.shared_prefix(model, examples)
    assert prefix[0] == (0 if recurrent else 12)
    assert ("every prompt in full" in capsys.readouterr().out) == recurrent
    fill = functools.partial(targets_for, model, examples, args, tmp_path)
    plain, cached = (fill(p).clone() for p in (bake.NO_PREFIX, prefix))
    fill(prefix)[examples[1].rows] = 0  # a hole, filled again; and a cache is not changed by its use
    assert torch.equal(cached, bake.teacher_targets(model, examples, prefix, tmp_path / "targets", args))
    assert_close(cached, plain, atol=1e-4, rtol=1e-4)
    ours = bake.batched_kl(*bake.both_states(model, examples, plain), head)
    assert_close(ours, loop_kl(model, examples), atol=1e-5, rtol=1e-4)
    if family != "Rwkv":  # it has no mask for padding, see the README
        chat, prompts = bake.Chat(args), [e.teacher for e in examples]
        with bake.teacher_mode(model):
            single = [bake.generate(model, chat, [p], bake.NO_PREFIX, 8, 0.0)[0] for p in prompts]
            assert bake.generate(model, chat, prompts, prefix, 8, 0.0) == single
    bits = lambda: {n: t.cpu().numpy().tobytes() for n, t in {**model.state_dict(), "targets": plain}.items()}
    before, _ = bits(), bake.train(model, head, examples, plain, args, tmp_path)
    changed = {name for name, data in bits().items() if data != before[name]}
    assert changed == {name for name in before if "lora_" in name}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}

@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80), size=st.integers(1, 9),
       seed=st.integers(0, 99), epoch=st.integers(0, 3))
def test_the_order_is_a_function_of_seed_and_epoch(lengths, size, seed, epoch):
    examples = [Example(str(i), [], [], [0] * n, [0]) for i, n in enumerate(lengths)]
    args = parse("x", "--batch-size", size, "--seed", seed)
    order = bake.batches(examples, args, epoch)
    assert order == bake.batches(copy.deepcopy(examples), args, epoch)
    assert sorted(e.where for batch in order for e in batch) == sorted(e.where for e in examples)
    assert sorted(map(len, order))[1:] == [size] * (len(order) - 1)

def test_batches_pad_little_and_the_learning_rate_rises_and_falls():
    lengths = np.random.default_rng(0).integers(1, 292, 500)
    examples = [Example(str(i), [], [], [0] * 9, [0] * n) for i, n in enumerate(lengths)]
    made, other = (bake.batches(examples, parse("x"), epoch) for epoch in (0, 1))
    read = sum(len(batch) * max(9 + len(e.response) for e in batch) for batch in made)
    assert sum(9 + lengths) / read >= 0.85 and made != other  # with lengths spread over 10..300
    rate = lambda step, warmup: bake.learning_rate(step, 10, parse("x", "--lr", 0.1, "--warmup", warmup))
    lrs, late = ([rate(step, warmup) for step in range(1, 11)] for warmup in (0.2, 0.99))
    assert late == sorted(late) and late[-1] == 0.1 and rate(1, 0) < 0.1
    assert lrs[:2] == [0.05, 0.1] and lrs[1:] == sorted(lrs[1:])[::-1] and lrs[-1] > 0

# ------------------------------------------------------------------ data, prompts and sampling
USER, REPLY, SYSTEM = user("Hi"), {"role": "assistant", "content": "Ho"}, {"role": "system", "content": "S"}
dialog = lambda *turns, **more: {"messages": [*turns], **more}
THREE = [USER, REPLY, USER]
SHAPES = [([([USER], "Ho")], [  # what is read, and the rows that say it
    dialog(USER, REPLY), dialog(USER, response="Ho"), [USER, REPLY], dict(prompt="Hi", completion="Ho"),
    dict(prompt=[USER], completion=[REPLY]), dict(prompt="Hi", response="Ho", extra={"kept": "out"}),
    dict(prompt="Hi", answer="Ho"), dict(question="Hi", answer="Ho"), dict(user_message="Hi", response="Ho"),
    dict(question="Hi", response="N", answer="Ho"), dict(instruction="Hi", output="Ho", input="", answer=7),
    dict(conversations=[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]),
    dialog(user([dict(type="text", text="H"), dict(type="text", text="i")]), REPLY)]),
    ([([USER], None)], [
        "Hi", dialog(USER), dict(messages="Hi"), dict(prompt="Hi"), dict(prompt="Hi", completion=None)]),
    ([([SYSTEM, USER], None)], [dict(system="S", prompt="Hi"), dialog(SYSTEM | {"role": "developer"}, USER),
        dict(system_prompt="S", query="Hi")]), ([([user("{{n}} {0} %s")], None)], [[user("{{n}} {0} %s")]]),
    ([([USER], "Ho"), (THREE, "Ho"), ([*THREE, REPLY, USER], None)], [dialog(*THREE, REPLY, USER)]),
    ([(THREE, "Ho")], [dict(prompt=THREE, completion="Ho"), [USER, REPLY | {"weight": 0}, USER, REPLY]]),
    ([([user("Hi\n\nyou")], "Ho")], [dict(instruction="Hi", input="you", output="Ho"),
                                     dict(instruction="Hi", context="you", response="Ho")])]
@pytest.mark.parametrize("expected, row", [(expected, row) for expected, rows in SHAPES for row in rows])
def test_every_shape_of_row(row, expected, tmp_path):
    assert bake.conversations(row) == expected
    for name, text in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row], indent=1))):
        assert bake.read_rows(write(tmp_path / name, text)) == [(f"{tmp_path / name}:1", row)]

@pytest.mark.parametrize("expected, rows", {
    "an object with one of messages, conversations, prompt": [7, None, {"text": "Hi"}],
    "text as the user message, found": [dict(messages={}), dict(question=None, answer="Ho"), [user(5)],
        [{"role": "user"}], [user(["Hi"])], [user(" ")], [user([{"type": "input_audio"}])]],
    "text as the assistant message, found 3": [dict(prompt="Hi", completion=3)],
    "text as instruction, found 5": [dict(instruction=5, input="x")],
    "a message with a role of system, developer, user": [
        dialog(7), dialog(USER | {"role": "tool"}), dialog(USER | {"role": None})],
    "text as the user message, found [{'type': 'image_url'}]": [[user([{"type": "image_url"}])]],

    "text alone, without tools, calls of them, images or audio": [dialog(USER, images=["a.png"]), dialog(
        USER, tools=[{}]), dialog(USER, REPLY | {"tool_calls": [{}]}), dialog(USER | {"audio": "a.wav"})],
    "a system message or none, a user's, then by turns": [
        [], [REPLY, USER], [SYSTEM], [USER, REPLY, REPLY], [USER, SYSTEM], dict(prompt="Hi", answer=[USER])]
}.items())
def test_bad_rows_say_why(expected, rows):
    for row in rows:
        refused("^expected " + re.escape(expected), bake.conversations, row, error=bake.Refused)

def test_files(tmp_path, monkeypatch):
    """BOM, CRLF, blank lines, U+2028 in strings, quotes and newlines in CSV, missing cells, hub data sets."""
    def read(name, text):
        rows = bake.read_rows(write(tmp_path / name, text))
        return [(where.removeprefix(f"{tmp_path / name}:"), row) for where, row in rows]
    one, (at, bad), two = read("a.jsonl", '\ufeff{"prompt": "a\u2028é"}\r\n\r\n["x"\n"b"\n')
    assert (one, at, two) == (("1", {"prompt": "a\u2028é"}), "3", ("4", "b")) and "expected JSON" in str(bad)
    assert read("a.json", '{"prompt": "a"}\n["b"]\n') == [("1", {"prompt": "a"}), ("2", ["b"])]
    assert read("a.txt", b"Why?\n  \nHow? \n\xff") == [("1", "Why?"), ("3", "How?"), ("4", "\udcff")]
    rows = read("a.csv", f'question, answer\r\n"Why, ""you""?","a\nb"\r\nHow?\r\nBig?,{"x" * 200_000}\r\n')
    assert [(at, bake.conversations(row)) for at, row in rows] == [("3", [([user('Why, "you"?')], "a\nb")]), (
        "4", [([user("How?")], None)]), ("5", [([user("Big?")], "x" * 200_000)])]
    refused("a header for", bake.conversations, read("c.csv", "prompt\nWhy, u?\n")[0][1], error=bake.Refused)
    for name, text, reason in [  # quotes: one left open, and two stray ones that would merge rows
            ("d.csv", 'a,b\n"c,d\ne,f', "d.csv:3: expected CSV"), ("b.json", "[]", "b.json: expected rows"),
            ("e.csv", 'a,b\n"c,d\n"e,f', "e.csv:3: expected CSV"), ("b.jsonl", "\n", "l: expected rows"), (
            "b.xml", "x", "b.xml to be a .jsonl")]:
        refused(reason, read, name, text)
    monkeypatch.setitem(sys.modules, "datasets", Args(load_dataset=lambda p, split: [{"prompt": p + split}]))
    assert bake.read_rows("me/mine") == [("me/mine:1", {"prompt": "me/minetrain"})]
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    refused("me/mine to be a .jsonl", bake.read_rows, "me/mine")

chat_for = functools.cache(lambda *flags, **more: bake.Chat(parse(*flags, **more)))
def built(rows, chat, args=None):
    rows, drops = [(f"f:{i}", row) for i, row in enumerate(rows, 1)], defaultdict(list)
    return bake.build_examples(rows, chat, args or chat.args, drops), drops

HI, FOLDED = "<|user|>Hi<|end|><|assistant|>", "<|user|>PIRATE\n\nHi<|end|><|assistant|>"
ARR, TINY, DAY = (f"<|system|>{text}<|end|>" for text in ("PIRATE", "I am Tiny.", "Today is 2020-02-03."))
THINKS = PLAIN.replace("<|assistant|>", "<|assistant|><think>{% if not deep %}</think>{% endif %}")
leading = lambda text: each(TURN.replace("}}|>", "}}|>{{ '%s' if m.role == 'assistant' }}" % text))
USUAL = ARR + HI, HI
TEMPLATES = {  # name: the template, what the teacher reads, what the student reads
    "plain": (PLAIN, *USUAL), "thinks deep": (THINKS, ARR + HI + "<think>", HI + "<think>"),
    "thinks": (THINKS, ARR + HI + "<think></think>", HI + "<think></think>"),
    "refuses": (each("{{ raise_exception('no') if m.role == 'system' }}" + TURN), FOLDED, HI),
    "drops": (each("{% if m.role != 'system' %}" + TURN + "{% endif %}"), FOLDED, HI),
    "merges": (each("{% if m.role != 'system' %}<|{{ m.role }}|>{% if loop.index0 and loop.previtem.role =="
                    " 'system' %}{{ loop.previtem.content }}\n{% endif %}{{ m.content }}<|end|>{% endif %}"),
               FOLDED.replace("\n\n", "\n"), HI),
    "default": ("{% if messages[0].role != 'system' %}" + TINY + "{% endif %}" + PLAIN, ARR + HI, TINY + HI),
    "dated": (DAY.replace("2020-02-03", "{{ strftime_now('%Y-%m-%d') }}") + PLAIN, DAY + ARR + HI, DAY + HI),
    "parts": (each("<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}<|end|>"), *USUAL),
    "no stop": (each("<|{{ m.role }}|>{{ m.content }}{{ '<|pad|>' if m.role != 'assistant' }}"),
                (ARR + HI).replace("end", "pad"), HI.replace("end", "pad")),
    "a line": (each(TURN + "\n"), (ARR + HI).replace("d|>", "d|>\n"), HI.replace("d|>", "d|>\n")),
    "strict": (each("{{ raise_exception('must alternate') if not loop.changed(m.role) }}" + TURN), *USUAL),
    "strips": (each(TURN.replace(" | trim", ".split('</think>') | last")), *USUAL),
    "empties": (leading("<think></think>"), *USUAL),  # the model would not emit those
    "leads": (leading(" "), *USUAL), "channels": (leading("<|pad|>"), *USUAL)}
LEADS = {"leads": " ", "channels": "<|pad|>"}
@pytest.mark.parametrize("name", TEMPLATES)
def test_laws_1_and_2_chat_templates(folders, name):
    """The sides differ in the prompt alone; what leads into answers is in the response, once."""
    template, teacher, student = TEMPLATES[name]
    kwargs = "--template-kwargs", '{"deep": true}' if "deep" in name else "{}"
    chat = chat_for(folders(), *kwargs, chat_template=template, prompt="PIRATE", date="2020-02-03")
    (one, two, led, deep, asked), _ = built([[USER, REPLY, USER, REPLY], dict(prompt="Hi", completion=" Ho"),
                                             dict(prompt="Hi", completion="<think>H</think>Ho"), "Hi"], chat)
    (own,), _ = built([one.messages], chat, parse("x", "--student-prompt", "Be."))  # its own system message
    text, lead = chat.tokenizer.decode, LEADS.get(name, "")
    said = lead + "Ho<|end|>"
    assert (text(one.teacher), text(one.student)) == (teacher, student)
    assert [text(e.response) for e in (one, two, led)] == [said, said, lead.strip() + " Ho<|end|>"]
    assert text(deep.response) == lead + "<think>" * ("deep" not in name) + "H</think>Ho<|end|>"
    assert asked.teacher == own.teacher == one.teacher and asked.response is None and own.response is None
    assert text(own.student) == teacher.replace("PIRATE", "Be.") and chat.folds == (teacher == FOLDED)
    assert one.messages == [SYSTEM | {"content": "PIRATE"}, USER]
    if name == "leads":  # which is seen also where a template insists on a system message
        insists = "{{ raise_exception('') if messages[0].role != 'system' }}"
        chat = chat_for(folders(), chat_template=insists + template)
        assert text(bake.encode_response(chat, HI, "\nHo")) == " \nHo<|end|>"
    if name == "plain":
        assert (text(two.teacher), text(two.student)) == (teacher + said + HI, student + said + HI)

def test_prompts_that_do_not_fit_together(folders):
    """A row that no honest pair of sides can be made of is refused with its place; so are bad arguments."""
    for prompt, row, reason, template in [
            (None, "Hi", "prompt .*found 0", PLAIN), (" ", "Hi", "one prompt .*found 0", PLAIN),
            ("P", [SYSTEM, USER], "one prompt .*found 2", PLAIN), ("\udcff", "Hi", "UTF-8", PLAIN),
            ("P", "\udcff", "UTF-8", PLAIN), ("P", dict(prompt="Hi", completion="\udcff"), "UTF-8", PLAIN),
            ("P", dict(prompt="\ud800"), "UTF-8", PLAIN), ("Hi", "Hi", "every text", each("{{ m.role }}")),
            ("P", dict(prompt="a", completion="<|user|>"), "without control tokens", PLAIN),
            (None, dialog(SYSTEM, user("a<|end|>")), "without control tokens", PLAIN),
            ("P" * 600, "Hi", "less than 512 tokens.* found 6", PLAIN),
            ("P", dialog(USER, USER), "must alternate", TEMPLATES["strict"][0]),
            ("P", dialog(user("no"), REPLY, user("no no")), "every text",  # one of 3 "no" is lost
             "{{ messages[0].content + messages[-1].content }}"),
            ("P", "Hi", "end both prompts alike", PLAIN + "{{ '!' if messages[0].role == 'system' }}")]:
        chat = chat_for(folders(), chat_template=template, prompt=prompt)
        refused(f"f:1: .*{reason}", built, [row], chat)
    assert parse("x", "--prompt-file", __file__).prompt.startswith('"""Tests')
    for flags in (["--epochs", 0], ["--lr", "nan"], ["--lr", "inf"], ["--template-kwargs", "{"],
                  ["--prompt", "a", "--prompt-file", __file__], ["--eval-fraction", 1], ["--warmup", 1.5]):
        refused(".", parse, "x", *flags)

def test_given_responses_are_dropped_cut_or_kept_as_ids(folders):
    """Empty ones are dropped and counted, long ones cut, prompts never; ids are kept if they are theirs."""
    rows = [dict(prompt="a", answer=" "), 5, dict(prompt="b", answer="c"), 6,
            dict(prompt=THREE, answer=[REPLY | {"weight": 0}])]
    chat = chat_for(folders(), "--prompt", "P")
    refused("f:2: expected an object with .*, found 5", built, rows, chat)
    (kept,), drops = built(rows, chat, parse("x", "--prompt", "P", "--skip-bad-rows"))
    assert kept.where == "f:3" and list(drops.values()) == [["f:1", "f:5"], ["f:2", "f:4"]]  # by reason
    one = lambda text, **ids: built([dict(prompt="Hi", response=text, **ids)], chat)[0][0]
    long, plain = one("x" * 600), one("Ho").response
    assert long.cut and len(long.teacher) + len(long.response) == 512 and chat.stop not in long.response
    long = one("x" * (511 - len(long.teacher)))
    assert not long.cut and long.response[-1] == chat.stop
    for ids in (["x"], [1e99], [None], [-1], [10 ** 20], [[1]], 7, [], plain[:1]):
        assert one("Ho", ids=ids).response == plain
    refused("f:1: .*stop token", built, [dict(prompt="Hi", response="Ho", ids=[256] + plain)], chat)
    assert one("Ho", ids=plain[:2]).response == plain[:2]  # cut by the length, no stop
    assert one("a<|user|>", ids=[64, 258]).response == [64, 258]  # sampled by the model itself

@pytest.mark.parametrize("pad", [None, "<|end|>", "<|pad|>"])
def test_one_bos_and_any_pad(folders, tmp_path, pad):
    """Tokenizer and template both add a BOS: one a side, none in a response. Any pad token, the same ids."""
    own = make_tokenizer("<|system|>" + PLAIN, pad, bos="<|system|>")
    ours = Samples(make_model(tmp_path / "m", tokenizer=own))
    plain = Samples(folders(), chat_template="<|system|>" + PLAIN)
    assert ours.chat.tokenizer("a").input_ids[0] == 257  # it would add one
    rows = [dict(prompt="Hi", completion="Ho"), "What?", "And a longer one?"]
    out, expected = (all_ids(side.run(rows, tmp_path / name)) for side, name in ((ours, "a"), (plain, "b")))
    assert out == expected and ours.chat.tokenizer.decode(out[0][2]) == "Ho<|end|>"
    assert all(s[0] == t[0] == 257 and s.count(257) == 1 and t.count(257) == 2 for t, s, _ in out)

@pytest.mark.parametrize("tail, response, expected", [
    (">\n", "Ho", [72, 111, 0]), (">\n", "\nHo", [10, 72, 111, 0]), ("> ", " Ho", [32, 72, 111, 0]),
    (":<think>\n", "<think>\nHo", [72, 111, 0]), (":<think>\n", "<think>Ho", [72, 111, 0])])
def test_responses_are_encoded_as_the_model_would_emit_them(tail, response, expected):
    """No mark of a text's start inside, no token across the seam (here two spaces or lines), no tag twice."""
    pieces = re.compile("\n\n|  |.", re.S)  # of a tokenizer
    ids = lambda text: [ord(p) if len(p) == 1 else 1000 for p in pieces.findall(text and " " + text)]
    assert bake.encode_response(Args(ids=ids, stop=0, lead=""), tail, response) == expected

def test_the_split_is_by_question():
    """All responses to a question are on one side, whatever the order; --eval-data takes its own out."""
    examples = [Example(f"r{i}", [user(f" q{i % 7} ")], [], [], [i]) for i in range(21)]
    args, drops = parse("x", "--eval-fraction", 0.25), defaultdict(list)
    kept = bake.split(examples, [], args, drops)
    held, trained = ({e.question for e in kept if e.held_out == side} for side in (True, False))
    assert len(kept) == 21 and len(held) == 2 and not held & trained
    assert {e.question for e in bake.split(examples[::-1], [], args, drops) if e.held_out} == held
    assert not any(e.held_out for e in bake.split(examples[:1], [], args, drops))
    kept = bake.split(examples, [Example("e", [user("q3")], [], [], [0])], parse("x", "--eval-data=e"), drops)
    assert drops == {"expected a question that is not held out": ["r3", "r10", "r17"]}
    assert [e.question for e in kept if e.held_out] == ["q3"] and len(kept) == 19

class Samples:  # a model that records its generate calls, and a chat
    def __init__(self, folder, *flags, **more):
        flags = "--prompt=Say much.", "--temperature=0", "--max-new-tokens=6", *flags
        self.model, _, self.args = loaded(folder, *flags, **more)
        self.chat, self.calls, generate = bake.Chat(self.args), [], self.model.generate
        self.model.generate = lambda **kw: self.calls.append(kw) or generate(**kw)

    def run(self, rows, path):
        self.examples, self.drops = built(rows, self.chat)
        given = self.model, self.chat, self.examples, bake.shared_prefix(self.model, self.examples)
        return bake.sample_responses(*given, path, self.args, self.drops)

def test_sampling_in_one_call(folders, tmp_path):
    """Each (row, trajectory) gets what it would get alone, and goes back to its row. The file is data."""
    s = Samples(folders())
    s.args.trajectories += 1  # it was 1, as greedy ones are all alike: two a row are seen below
    rows = ["A long question, isn't it?", "Hi", dict(prompt="Q", completion="A"), "Why so?"]
    given, *sampled = s.run(rows, tmp_path / "t.jsonl")
    assert len(s.calls) == 1 and given == s.examples[2]
    assert sorted(e.where for e in sampled) == ["f:1", "f:1", "f:2", "f:2", "f:4", "f:4"]
    with bake.teacher_mode(s.model):
        for e in sampled:
            assert e.teacher == next(x.teacher for x in s.examples if x.where == e.where)
            assert [e.response] == bake.generate(s.model, s.chat, [e.teacher], bake.NO_PREFIX, 6, 0.0)
    again, _ = built(map(json.loads, open(tmp_path / "t.jsonl")), chat_for(folders()))
    assert all_ids(again) == all_ids(sampled)
    assert bake.sample_responses(None, None, sampled, None, None, s.args, {}) is sampled  # nothing to do

def test_sampled_ids_are_cut_after_the_stop_and_never_given_one(folders, tmp_path):
    s = Samples(folders(), "--trajectories", 1)
    raw = {"a": [5, 6, 256, 9, 256, 256], "b": [256] * 6, "c": [1, 2, 3, 4, 5, 6]}
    letter = lambda ids: s.chat.tokenizer.decode(ids[-3])  # before <|end|> and <|assistant|>
    s.model.generate = lambda input_ids, **_: torch.cat(
        [input_ids, torch.tensor([raw[letter(ids)] for ids in input_ids], device=DEVICE)], 1)
    out = s.run(["a", "bb", "ccc"], tmp_path / "t.jsonl")
    assert sorted((e.where, e.response) for e in out) == [("f:1", [5, 6, 256]), ("f:3", [1, 2, 3, 4, 5, 6])]
    assert s.drops["expected a sampled response with text"] == ["f:2"]

def test_sampling_takes_nothing_from_the_checkpoint(tmp_path):
    """A hostile generation_config does not leak in: first tokens are as the logits say. Its eos ids count."""
    write(Path(make_model(tmp_path)) / "generation_config.json", json.dumps(dict(
        top_k=1, top_p=0.3, repetition_penalty=1.7, max_length=3, do_sample=True, num_beams=1,
        forced_eos_token_id=7, suppress_tokens=[1, 2], eos_token_id=[256, 9], min_length=4)))
    s = Samples(tmp_path, "--trajectories", 64, "--temperature", 1.5)
    assert s.chat.stops == {256, 9} and s.chat.stop == 256
    said = [e.response for e in s.run(["Hi", "Hi", "Hi", "Hi"], tmp_path / "t.jsonl")]
    counts = np.bincount([ids[0] for ids in said], minlength=272)
    with torch.no_grad(), s.model.disable_adapter():
        logits = s.model(input_ids=torch.tensor([s.examples[0].teacher], device=DEVICE)).logits[0, -1]
    p = (logits / 1.5).softmax(-1).cpu().numpy()
    likely, longest = p.argsort()[-5:], max(said, key=len)
    assert np.abs(counts[likely] / len(said) - p[likely]).max() < 0.12 and (counts > 0).sum() > 5
    assert len(longest) == 6 and longest[-1] != 7 and not any(9 in ids[:-1] for ids in said)

def test_interrupted_sampling_goes_on_behind_the_last_whole_batch(folders, tmp_path):
    """And no batch repeats the samples of another, though all prompts are alike here."""
    s = Samples(folders(), "--trajectories", 12, "--batch-size", 1, "--temperature", 1)
    sample = lambda: s.run(["What is that?"], tmp_path / "t.jsonl")
    whole = sample() and (tmp_path / "t.jsonl").read_bytes()
    assert len(s.calls) == 3 and len(set(whole.split(b"\n"))) > 5
    for at in (0, 10, len(whole) // 2, len(whole) - 1, len(whole)):
        (tmp_path / "t.jsonl").write_bytes(whole[:at])
        s.calls.clear()
        assert sample() and (tmp_path / "t.jsonl").read_bytes() == whole
        assert len(s.calls) == (0 if at == len(whole) else 3 - whole[:at].count(b"\n") // 4)

def test_models_that_cannot_be_baked_are_refused(folders, tmp_path, monkeypatch):
    """Above all those whose logits make_head does not know: they would be trained wrongly, in silence."""
    load = lambda names: bake.load_model(parse(folders("Gemma2"), "--target-modules", names))[0]
    assert {n.split(".")[-1] for n in load("q_proj, v_proj").targeted_module_names} == {"q_proj", "v_proj"}
    for names in ("lm_head,q_proj", "embed_tokens", "nothing_like_it", "q_proj,nope", "self_attn"):
        refused("--target-modules", load, names)
    plain = bake.make_head
    monkeypatch.setattr(bake, "make_head", lambda base: lambda hidden: plain(base)(hidden) * 1.1)
    refused("make_head", load, "all-linear")
    refused(f"--model {tmp_path} to be", bake.Chat, parse(tmp_path))  # an empty folder
    make_model(tmp_path, tokenizer=make_tokenizer(None))
    refused("--chat-template", bake.Chat, parse(tmp_path))
    for file in tmp_path.glob("*config.json"):
        write(file, re.sub(r'("eos_token\w*"): ("<.end.>"|256)', r"\1: null", file.read_text()))
    refused("no stop token", bake.Chat, parse(tmp_path, chat_template=PLAIN))
    write(tmp_path / "config.json", json.dumps(dict(model_type="own", auto_map={"AutoConfig": "own.Own"})))
    refused("trust_remote_code", bake.Chat, parse(tmp_path))  # own.py is not even looked for

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_bases(folders, dtype, tmp_path):
    (model, head, args), rows = loaded(folders(), dtype=dtype), make_examples([(3, 4, 2), (1, 9, 7)])
    kl = bake.batched_kl(*bake.both_states(model, rows, targets_for(model, rows, args, tmp_path)), head)
    for x in (kl, *torch.autograd.grad(kl.sum(), lora(model))):
        assert x.dtype == torch.float32 and x.isfinite().all()
    assert_close(kl, loop_kl(loaded(folders())[0], rows), atol=0.1, rtol=0.1)

# ----------------------------------------------------------------------------- a run, end to end
@pytest.fixture(scope="session")
def command(folders, tmp_path_factory):
    """command(out, more) -> the command line of a short run: --model FOLDER --data FILE and so on."""
    prompt = SYSTEM | {"content": "Answer like a pirate, please: *arr*\n<b>&</b> ```x```"}
    rows = [[prompt, user(f"Question {i}, what now?")] for i in range(12)]
    rows[0].append(REPLY | {"content": "# Arr\r\n</pre>"})
    data = write(tmp_path_factory.mktemp("data") / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    fixed = "--dtype float32 --trajectories 2 --max-new-tokens 12 --epochs 4 --lr 1e-2 --eval-fraction .25"
    given = write(Path(data).with_name("template"), PLAIN + "{# given #}")
    return lambda out, more="": ["--model", folders(), "--data", data, "--merge", "--chat-template", given,
                                 *f"--out {out} {fixed} {more}".split()]

@pytest.fixture(scope="session")
def run(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "a" / "b"
    return out, bake.main(command(out))

def test_a_run_bakes(run, command, tmp_path):
    """Held-out KL is halved, and is what plain passes find in what PEFT loads; the card is inert text."""
    out, report = run
    assert report == json.loads((out / "report.json").read_text())
    assert report["kl_after"] < 0.5 * report["kl_before"] and report["top1_after"] > report["top1_before"]
    assert report["recovered"] == pytest.approx(1 - report["kl_after"] / report["kl_before"])
    assert (report["rows_read"], report["rows_used"], report["rows_dropped"]) == (12, 12, 0)
    assert report["held_out_questions"] == 3 and report["trained_questions"] == 9
    assert {p.name for p in out.iterdir()} == set((
        ".lock README.md adapter_config.json adapter_model.safetensors args.json chat_template.jinja kl.svg "
        "merged metrics.jsonl report.json tokenizer.json tokenizer_config.json trajectories.jsonl").split())
    log = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert [m["step"] for m in log] == list(range(13)) and log[-1]["eval_kl"] == report["kl_after"]
    assert {"kl", "lr", "grad_norm", "tokens_per_s", "epoch"} <= log[1].keys()
    assert len(list(open(out / "trajectories.jsonl"))) == 11 * 2
    config = json.loads((out / "adapter_config.json").read_text())  # vLLM's default limit is a rank of 16
    assert (config["r"], config["bias"], config["modules_to_save"]) == (16, "none", None)
    assert config["target_modules"] == sorted(config["target_modules"])  # the same in every run
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: ") and f"{report['recovered']:.4f}" in card
    inside = [line for line in card.split("\n") if re.search("<b>|</pre>|```", line)]
    assert inside and all(line.startswith("    ") for line in inside)
    assert "<polyline points=" in (out / "kl.svg").read_text()
    names = safetensors.torch.load_file(out / "adapter_model.safetensors")
    assert names and all(re.search(r"lora_[AB]\.weight$", n) for n in names)
    _, folder, _, data, *_ = command(out)
    chat, drops = chat_for(folder, "--eval-fraction", .25), defaultdict(list)
    rows = bake.read_rows(data) + bake.read_rows(str(out / "trajectories.jsonl"))
    examples = bake.split(bake.build_examples(rows, chat, chat.args, drops), [], chat.args, drops)
    held = [e for e in examples if e.held_out and e.response]
    assert len(held) == report["held_out_responses"]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(out).to(DEVICE)
    merged = AutoModelForCausalLM.from_pretrained(out / "merged").to(DEVICE)
    ids = torch.tensor([held[0].teacher], device=DEVICE)
    with torch.no_grad():
        assert loop_kl(model, held).mean().item() == pytest.approx(report["kl_after"], abs=1e-5)
        assert (merged(input_ids=ids).logits - model(input_ids=ids).logits).abs().max() < 1e-4
    assert AutoTokenizer.from_pretrained(out / "merged").chat_template == PLAIN + "{# given #}"
    other = bake.main(command(tmp_path, "--micro-batch-size 3 --gradient-checkpointing"))
    assert other["kl_after"] == pytest.approx(report["kl_after"], abs=1e-3)

def test_the_same_command_again_says_that_it_is_done(run, command, tmp_path, capsys, monkeypatch):
    """A finished run is neither run again nor overwritten; nothing to train on or to evaluate is no run."""
    out, report = run
    _, folder, _, data, *_ = command(out)
    files = lambda: {p: p.read_bytes() for p in out.iterdir() if p.is_file()}
    before, rows = files(), Path(data).read_bytes()
    folds = write(tmp_path / "folds", TEMPLATES["refuses"][0])
    refused("nope", bake.main, command(tmp_path / "a", f"--target-modules nope --chat-template {folds}"))
    shown, first = capsys.readouterr().out, json.loads(rows.split(b"\n")[0])[0]["content"]
    assert f"--- the teacher reads, in {data}:1:\n<|user|>{first}\n\nQ" in shown
    assert "no system message:" in shown
    monkeypatch.setattr(bake, "load_model", None)
    assert bake.main(command(out)) == report and "is done" in capsys.readouterr().out
    bad = write(tmp_path / "bad.jsonl", '{"prompt": "a", "completion": ""}\n{"prompt": 3}\n')
    for where, more, reason in [
            (out, "--lr .5 --seed 3", "lr: 0.01 there, 0.5 here; seed: 0 there, 3 here"),
            (out, "--prompt x", "prompt"), (folder, "", "files of something else"), (data, "", "exists"),
            (tmp_path / "a", f"--prompt P --data {bad}", "l:2: expected text as the user message, found 3"),
            (tmp_path / "a", f"--prompt P --data {bad} --skip-bad-rows", "l:2: of all rows none is left"),
            (tmp_path / "b", f"--skip-bad-rows --eval-data {bad}", "l:2: of all .*a response with text"),
            (f"{data}/in/a/file", "", "Not a directory")]:
        refused(reason, bake.main, command(where, more), error=(SystemExit, OSError))
    write(Path(data), rows + b"\n")
    refused("sha256 of data", bake.main, command(out))
    write(Path(data), rows)
    said, args = json.loads(before[out / "args.json"]), bake.parse_args(command(out))
    assert said["sha256 of bake.py"] == hashlib.sha256(Path(bake.__file__).read_bytes()).hexdigest()
    write(out / "args.json", json.dumps(said | {"date": "2020-02-03", "versions": {"torch": "1.0"}}))
    bake.claim(out, args)  # the day it began holds; other versions are mentioned
    assert args.date == "2020-02-03" and "began: versions: {'torch'" in capsys.readouterr().out
    write(out / "args.json", before[out / "args.json"])
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused("another run is at work", bake.main, command(out))
    assert files() == before

def test_law_9_training_goes_on_where_it_was(command, run, tmp_path, monkeypatch):
    """k + m steps are k steps, a crash (full disk, Ctrl-C, NaN), and m steps, to the last bit."""
    again, write, plain, seen = command(tmp_path, "--save-every 2"), Path.write_bytes, bake.train_step, []
    def write_once(path, data):
        write(path, data[:9])  # half of it
        if "checkpoint.pt" in path.name and len(torch.load(io.BytesIO(data))[2]) == 4:
            raise OSError(28, "No space left on device")
        return write(path, data)
    def step(model, *rest):
        seen.append({n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad})
        if len(seen) == 4:
            raise KeyboardInterrupt("in step 6")
        return plain(model, *rest) * (math.nan if len(seen) == 5 else 1)
    monkeypatch.setattr(Path, "write_bytes", write_once)
    refused("No space left", bake.main, again, error=OSError)
    assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)[2]) == 3
    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(bake, "train_step", step)
    refused("in step 6", bake.main, again, error=KeyboardInterrupt)
    refused(r"step 5: KL nan, gradient norm nan, in .*rows.jsonl:\d+.* holds step 4", bake.main, again)
    weights, _, log = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert [m["step"] for m in log] == [0, 1, 2, 3, 4]
    assert all(torch.equal(weights[n].to(DEVICE), w) and w.isfinite().all() for n, w in seen[4].items())
    rates, update = [], torch.optim.AdamW.step
    recorded = lambda self: rates.append(self.param_groups[0]["lr"]) or update(self)
    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    assert bake.main(again) == run[1]
    assert rates == [json.loads(line).get("lr") for line in open(tmp_path / "metrics.jsonl")][5:]  # as logged
    timeless = lambda path: re.sub(rb'"tokens_per_s": \d+', b"", path.read_bytes())
    for name in ("adapter_model.safetensors", "metrics.jsonl"):
        assert timeless(tmp_path / name) == timeless(run[0] / name)

@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_in_one_line(command, tmp_path, name):
    program = [sys.executable, bake.__file__, *command(tmp_path, "--epochs 500 --save-every 1")]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(getattr(signal, name))
    said = process.communicate()[1]
    assert process.returncode == 1 and "Traceback" not in said
    assert said.endswith("\nstopped; what is done is kept in --out: the same command goes on from there\n")

def test_out_of_memory_says_what_takes_less(command, tmp_path, monkeypatch):
    def full(*_, **kw):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(torch, "from_file", full)
    monkeypatch.setattr(signal, "signal", print)
    monkeypatch.setattr(sys, "argv", ["bake.py", *command(tmp_path)])
    refused("CUDA out .*--micro-batch-size 1.* goes on", runpy.run_path, bake.__file__, None, "__main__")

@pytest.mark.parametrize("kls, training, held_out, note", [
    ([.5, .6], .5, 9, "the bake failed"), ([.5, .45], .45, 9, "less than a fifth"), ([.5, .05], .05, 9, None),
    ([.0005, .0001], .01, 9, "does nothing"), ([.5, .1, .2], .2, 9, "an epoch had KL 0.1000"),
    ([.5, .2], .05, 9, "far below"), ([.5, .1], .1, 2, "fewer than 5"), ([.5, .1], .1, 9, "2 different")])
def test_a_bake_that_failed_says_so(kls, training, held_out, note):
    prompt = lambda i: SYSTEM | {"content": f"S{i % 2 * (note == '2 different')}"}
    examples = [Example("", [prompt(i), user(f"{i}")], [], [], [1], held_out=i < held_out) for i in range(20)]
    log = [{"step": i, "kl": training, "eval_kl": kl, "eval_top1": 0.5} for i, kl in enumerate(kls)]
    report = bake.make_report(examples, 20, {"expected because": ["f:1", "f:2"]}, log, parse("x"))
    first, *notes = report["notes"]
    assert first == "dropped 2: expected because (first: f:1)" and len(notes) == (note is not None)
    assert (note or "") in "".join(notes) and (report["recovered"] is None) == (kls[0] < 1e-3)

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
def test_a_run_survives_kill_9_at_any_moment(command, tmp_path):
    more = "--save-every 3 --batch-size 2 --trajectories 8 --epochs 2"
    whole, out, rng, seen = tmp_path / "whole", tmp_path / "killed", np.random.default_rng(0), set()
    for phase, most in dict(sample_responses=0.4, teacher_targets=0.2, train=0.4, samples=0.1).items():
        for _ in range(3):
            killer = [sys.executable, "-c", KILLER, phase, str(rng.random() * most), *command(out, more)]
            done = subprocess.run(killer, cwd=Path(bake.__file__).parent, capture_output=True, text=True)
            assert done.returncode == -9 and "Traceback" not in done.stderr, done.stderr
            seen.add(str(sorted(p.name for p in out.iterdir())))
    assert bake.main(command(out, more)) == bake.main(command(whole, more)) and len(seen) >= 3, seen
    for name in ("adapter_model.safetensors", "trajectories.jsonl", "kl.svg"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda x:
    st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from(
        "role content from value type text tool_calls".split()), x, max_size=3), max_leaves=8)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]),
                                        "content": st.text(max_size=6) | JSON}), max_size=5)
KEYS = "messages prompt completion response question ids system instruction input conversations tools".split()
ROW = JSON | st.dictionaries(st.sampled_from(KEYS), JSON | TURNS | st.text(max_size=9), max_size=4)
TEXT = st.text("abAB<|>{}%é \n", min_size=1, max_size=9).filter(str.strip)
@given(rows=st.lists(ROW, max_size=4), flags=st.sets(st.sampled_from(["--prompt=Be a.", "--skip-bad-rows"])),
       name=st.sampled_from(["f.jsonl", "f.json", "f.txt", "f.csv"]), noise=st.binary(max_size=5))
@settings(max_examples=300)
def test_any_file_is_read_or_refused_by_line(folders, tmp_path_factory, rows, flags, name, noise):
    """Whatever the file holds: examples for which laws 1 and 2 hold, or one line that says where."""
    data = json.dumps(rows) if name == "f.json" else "\n".join(map(json.dumps, rows))
    path, chat = tmp_path_factory.getbasetemp() / name, chat_for(folders(), *sorted(flags))
    try:
        read = bake.read_rows(write(path, data.encode() + noise))
        examples = bake.build_examples(read, chat, chat.args, defaultdict(list))
    except SystemExit as error:
        assert re.match(re.escape(str(path)) + r":(\d+: .+| expected rows)", str(error), re.S)
        return
    for e in examples:
        assert e.response is None or (set(e.response) - chat.stops and e.response[-1] in chat.stops)
        assert e.teacher[-1] == e.student[-1] and e.teacher != e.student and e.student
        assert chat.tokenizer.decode(e.student) in chat.tokenizer.decode(e.teacher)

@given(name=st.sampled_from(sorted({*TEMPLATES} - {*LEADS})), prompt=TEXT,
       turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
@settings(max_examples=150)
def test_laws_1_and_2_for_any_template(folders, name, prompt, turns):
    """The prompt is in the teacher's context alone; both sides end alike, in the response and one stop id."""
    chat = chat_for(folders(), chat_template=TEMPLATES[name][0])
    row = [turn for asked, said in turns for turn in (user(asked), REPLY | {"content": said})]
    examples, _ = built([row], chat, parse("x", "--prompt", prompt))
    for e, (_, said) in zip(examples, turns, strict=True):
        teacher, student, response = map(chat.tokenizer.decode, (e.teacher, e.student, e.response))
        assert teacher.count(prompt.strip()) > student.count(prompt.strip())
        assert response == said + "<|end|>" and "<|assistant|>" in student
        assert teacher.rpartition("<|assistant|>")[2] == student.rpartition("<|assistant|>")[2]

# ----------------------------------------------------------------------- measurements: make bench
@pytest.fixture(scope="module")
def bench_model(tmp_path_factory):
    """The demo model in fp32 on a CPU; on CUDA the shape of Qwen3-0.6B with random weights, in bf16."""
    folder = Path(bake.__file__).parent / "models" / "SmolLM2-135M-Instruct"
    if DEVICE == "cuda":
        folder, config = tmp_path_factory.mktemp("qwen"), transformers.Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, tie_word_embeddings=True, dtype="bfloat16")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    args = bake.parse_args(["--model", str(folder), "--data", "none"])
    print(f"\n{transformers.__version__=} {torch.__version__=} {DEVICE} {args.dtype} "
          f"{torch.cuda.get_device_name() if DEVICE == 'cuda' else torch.get_num_threads()}")
    return *bake.load_model(args), args

def seconds(rounds=1, **steps):
    """Steps by name -> the median time of each. They take turns, so that a slow moment hits them all."""
    times, wait = defaultdict(list), torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for name in [*steps] * rounds:
        times[name].append(timeit.timeit(lambda: (steps[name](), wait()), setup=wait, number=1))
    return {name: float(np.median(taken)) for name, taken in times.items()}

def peak_memory(step):
    """MB allocated at the highest moment of a step, above those before it."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, _ = torch.cuda.memory_allocated(), step()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    return max(np.cumsum([e.nbytes() for e in events if e.name() == "[memory]"]).max(), 0) / 2 ** 20

def dense_step(model, head, examples, share=1.0, logits=None):
    """One padded batch, (B, R, V) logits of both sides at the response positions, teacher run again."""
    pad = lambda rows: bake.pad_sequence(rows, True)
    logits = logits or (lambda side: head(pad(bake.response_states(model, examples, side))))
    with bake.teacher_mode(model):
        teacher = logits("teacher")
    mask = pad([torch.ones(len(e.response), device=DEVICE) for e in examples])
    loss = share * ((bake.token_kl(logits("student"), teacher) * mask).sum(1) / mask.sum(1)).mean()
    loss.backward()
    return loss.detach()

@pytest.mark.bench
def test_bench_many_rows(folders, tmp_path):  # the first, as later ones leave a large heap behind
    status = lambda key: int(re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    for n in (5_000, 20_000):
        rows = (dict(prompt=f"Question {i}?", completion="word " * 40) for i in range(n))
        data = write(tmp_path / "many.jsonl", "\n".join(map(json.dumps, rows)))
        chat, start = chat_for(folders(), "--batch-size", 32, prompt="Be brief. " * 20), time.perf_counter()
        examples = bake.build_examples(bake.read_rows(data), chat, chat.args, defaultdict(list))
        loading, before = time.perf_counter() - start, status("RssAnon")
        model, head = bake.load_model(chat.args)
        targets = targets_for(model, examples, chat.args, tmp_path)
        told, ms = status("RssAnon"), []
        for batch in bake.batches(examples, chat.args, 0):
            step = lambda: bake.train_step(model, head, batch, targets, lora(model), chat.args)
            ms.append(1000 * seconds(step=step)["step"])
            model.zero_grad()
        first, _, last = (np.median(third) for third in np.array_split(ms, 3))
        print(f"\n{n} rows: read in {loading:.1f} s, {1e6 * loading / n:.0f} us each; private MB: "
              f"{before:.0f}, {told:.0f} after the targets, {status('RssAnon'):.0f} after training; "
              f"peak {status('VmHWM'):.0f}; ms a step: {first:.1f} in the 1st third, {last:.1f} in the last")

@pytest.mark.bench
def test_bench_steps(bench_model, tmp_path):
    model, head, args = bench_model
    sizes, x, y, B = ((64, 512, 2048), 20, 64, 4) if DEVICE == "cpu" else ((64, 1000, 4000), 50, 150, 16)
    args.batch_size = args.micro_batch_size = B
    optimizer, later = torch.optim.AdamW(lora(model), lr=0.0), []
    print(f"\nB={B} x={x} y={y}\n    u variant        s/step tokens/s  x sft x dense usual/ dense/  peak MB")
    for u in sizes:
        examples = make_examples([(0, x, y)] * B, shared=u)
        prefix = bake.shared_prefix(model, examples)
        targets = targets_for(model, examples, args, tmp_path, prefix)
        learn = lambda targets: bake.train_step(model, head, examples, targets, lora(model), args)[0]
        ids = {side: torch.tensor([getattr(e, side) + e.response for e in examples], device=DEVICE)
               for side in ("student", "teacher")}
        labels = torch.where(torch.arange(x + y, device=DEVICE) < x, -100, ids["student"])
        usual = lambda side: model(  # as it is mostly written: a mask, and logits of all positions
            ids[side], attention_mask=torch.ones_like(ids[side])).logits[:, -y - 1:-1]
        ways = {"loop": lambda: sum(dense_step(model, head, [e], 1 / B) for e in examples),
                "usual": lambda: dense_step(model, head, examples, logits=usual),
                "dense": lambda: dense_step(model, head, examples),
                "first epoch": lambda: learn(targets_for(model, examples, args, tmp_path, prefix)),
                "later epochs": lambda: learn(targets),
                "sft": lambda: model(ids["student"], labels=labels, use_cache=False).loss.backward()}
        step = lambda name: (ways[name](), optimizer.step(), optimizer.zero_grad())[0]
        right = loop_kl(model, examples, logits_to_keep=y + 1).mean().item()
        *losses, _ = map(step, ways)  # the warm-up; the last of them has another loss
        assert all(abs(x - right) < (1e-5 if DEVICE == "cpu" else 1e-2) for x in losses), (losses, right)
        t = seconds(5 if u < 2000 else 3, **{name: functools.partial(step, name) for name in ways})
        later.append(t["later epochs"])
        for name, s in t.items():
            print(f"{u:5} {name:13}{s:8.3f}{B * y / s:9.0f}{s / t['sft']:7.2f}{s / t['dense']:8.3f}"
                  f"{t['usual'] / s:7.1f}{t['dense'] / s:7.1f}{peak_memory(lambda: step(name)):9.0f}")
    if DEVICE == "cuda":  # a step waits for nothing: it would raise here
        torch.cuda.set_sync_debug_mode("error")
        learn(targets)
        torch.cuda.set_sync_debug_mode("default")
    print(f"later epochs, {sizes[-1]} / {sizes[0]} tokens of prompt: {later[-1] / later[0]:.2f}")

@pytest.mark.bench
def test_bench_loss_memory(bench_model):
    model, head, _ = bench_model
    D = model.get_output_embeddings().weight.shape[1]
    def peak(N, loss):
        student = torch.randn(8, N // 8, D, device=DEVICE, dtype=model.dtype, requires_grad=True)
        teacher, mask = student.detach() + 1, torch.ones(8, N // 8, dtype=torch.bool)
        return peak_memory(lambda: loss(student, teacher, mask, head).sum().backward()), student.nbytes
    ours, dense = bake.batched_kl, lambda student, teacher, *_: bake.token_kl(head(student), head(teacher))
    (small, _), (large, gradient), (full, _) = peak(2048, ours), peak(8192, ours), peak(2048, dense)
    print(f"\nloss, MB, 2,048 tokens: {small:.0f}, dense {full:.0f}, {small / full:.1%}; 8,192: {large:.0f}")
    assert small <= 0.1 * full and large - small <= gradient / 2 ** 20, gradient

@pytest.mark.bench
def test_bench_sampling(bench_model):  # 8 rows x 4 trajectories of 32 tokens, u=512
    model, _, args = bench_model
    chat, examples = bake.Chat(args), make_examples([(0, 20, 1)] * 8, shared=512)
    chat.stops, chat.stop = {chat.vocab - 1}, chat.vocab - 1  # next to never sampled: full lengths
    prompts, prefix = [e.teacher for e in examples for _ in range(4)], bake.shared_prefix(model, examples)
    one = lambda: [bake.generate(model, chat, [p], bake.NO_PREFIX, 32, 1.0) for p in prompts]
    with bake.teacher_mode(model):
        alone, batch = seconds(a=one, b=lambda: bake.generate(model, chat, prompts, prefix, 32, 1.0)).values()
    print(f"\nsampled tokens/s: {1024 / alone:.0f} alone, {1024 / batch:.0f} batched: {alone / batch:.1f} x")

@pytest.mark.bench
def test_bench_whole_run(bench_model, tmp_path):
    """3 epochs of 16 responses, u=512: all that bake.main does, against loading the model and dense steps."""
    chat = bake.Chat(bench_model[2])
    text = lambda start, n: chat.text(chat.ids(start + " and so on" * 600)[:n])
    rows = [dict(prompt=text(f"Question {i}:", 12), response=text(f"Answer {i}:", 63)) for i in range(16)]
    data = write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)))
    flags = ["--model", bench_model[2].model, "--data", data, "--prompt", text("Answer", 512), *(
        f"--out {tmp_path / 'out'} --epochs 3 --batch-size 4 --eval-fraction 0 --max-new-tokens 1").split()]
    def dense():
        args = bake.parse_args(flags)
        model, head = bake.load_model(args)
        examples = bake.build_examples(bake.read_rows(args.data), chat, args, defaultdict(list))
        optimizer = torch.optim.AdamW(lora(model), lr=args.lr)
        for batch in sum((bake.batches(examples, args, epoch) for epoch in range(3)), []):
            dense_step(model, head, batch)
            optimizer.step()
            optimizer.zero_grad()
    t = seconds(dense=dense, ours=lambda: bake.main(flags))
    print(f"\nwhole run: dense {t['dense']:.1f} s, bake.py {t['ours']:.1f} s: {t['dense'] / t['ours']:.1f} x")
