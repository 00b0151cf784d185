#!/usr/bin/env python3
"""Bake a system prompt into the weights of a language model (prompt baking, arXiv:2409.13697).

For a model θ and a system prompt u, train LoRA weights θ_u with which the model without the prompt
predicts what it would predict with it, over the tokens of responses y:

    P_θu(y | x) ≈ P_θ(y | u, x)    by minimising    KL( P_θ(·|u,x) ‖ P_θu(·|x) )

One network is both teacher (adapters off, sees u) and student (adapters on, does not). The KL is
exact, and a step costs what plain fine-tuning costs, however long u is, because
  1. the teacher is frozen: its final hidden states are computed once and kept in a file;
  2. teacher prompts start alike: the KV cache of what they share is computed once;
  3. only positions that predict the response meet the head, in chunks that form their gradient.

    $ python bake.py --model Qwen/Qwen3-0.6B --data examples/pirate.jsonl
    $ python bake.py --model DIR --data questions.txt --prompt "You are ..." --out runs/mine

Left out: top-k approximations of the KL, sampling inside the training step, full fine-tuning.
Shapes: B samples, T tokens, R response tokens, D hidden size, V vocabulary, N tokens to predict.
"""
import collections, contextlib, copy, csv, dataclasses, datetime, fcntl, functools  # noqa: E401
import hashlib, io, json, math, os, re, signal, sys, time  # noqa: E401
from argparse import ArgumentDefaultsHelpFormatter as Defaults, ArgumentParser, Namespace as Args
from pathlib import Path

import numpy as np, peft, torch, transformers  # noqa: E401
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

NOISE = 1e-3  # nats per token: a prompt that moves the model by less does nothing to bake
NO_PREFIX = 0, lambda B: {}  # no tokens are shared, and no argument hands over their KV cache

# -------------------------------------------------------------------------------- 1. Command line
def parse_args(argv: list[str] | None = None) -> Args:
    """Command line -> namespace, with every `auto` resolved."""
    p = ArgumentParser("bake.py", description=__doc__.split("\n")[0], formatter_class=Defaults)
    group = p.add_argument_group("what to bake")
    flag, either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    flag("--model", required=True, help="folder or hub name of a causal language model")
    flag("--data", required=True, help=".jsonl .json .csv .txt (a question a line) or hub data set")
    either("--prompt", help="the system prompt to bake; without it, each row's own system message")
    either("--prompt-file", dest="prompt", type=read_text, help="a file that holds the prompt")
    flag("--student-prompt", help="a system message that the student keeps")
    flag("--chat-template", type=read_text, help="a Jinja file instead of the tokenizer's own")
    flag("--template-kwargs", type=json.loads, default="{}", help="JSON, given to both sides")
    flag("--skip-bad-rows", action="store_true", help="drop and count rows that cannot be used")
    flag = p.add_argument_group("responses, sampled from the prompted model").add_argument
    flag("--trajectories", type=int, default=4, help="responses sampled per row that has none")
    flag("--max-new-tokens", type=int, default=128, help="tokens of the longest of them")
    flag("--temperature", type=float, default=1.0, help="with top-p 1 and top-k 0; 0 is greedy")
    flag = p.add_argument_group("training and evaluation").add_argument
    flag("--rank", type=int, default=16, help="rank of the LoRA matrices")
    flag("--alpha", type=float, default=32, help="LoRA alpha: updates are scaled by alpha / rank")
    flag("--target-modules", default="all-linear", help="or module names with commas between")
    flag("--epochs", type=int, default=3, help="passes over the training responses")
    flag("--batch-size", type=int, default=8, help="responses per optimizer step")
    flag("--micro-batch-size", type=int, help="responses per forward pass; fewer save memory")
    flag("--lr", type=float, default=1e-3, help="peak learning rate of AdamW; then cosine to 0")
    flag("--warmup", type=float, default=0.1, help="share of the steps in which it rises")
    flag("--kl-temperature", type=float, default=1.0, help="softmax temperature of the trained KL")
    flag("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    flag("--save-every", type=int, default=100, help="steps between checkpoints")
    flag("--eval-fraction", type=float, default=0.15, help="share of the questions held out")
    flag("--eval-data", help="held-out rows from a file of their own instead")
    flag = p.add_argument_group("machine and output").add_argument
    flag("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    flag("--device", default="auto", help="auto: cuda, with bfloat16, if there is one, else cpu")
    flag("--seed", type=int, default=0, help="of split, sampling, LoRA and data order")
    flag("--out", default="runs/bake", help="folder for adapter, report and work in progress")
    flag("--merge", action="store_true", help="also write OUT/merged, a model without adapters")
    flag("--trust-remote-code", action="store_true", help="run code that the model's folder brings")
    args = p.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name in ("temperature", "warmup", "eval_fraction", "seed") else 1e-9
        below = 1 if name in ("warmup", "eval_fraction") else math.inf  # a share is no percentage
        if type(value) in (int, float) and not least <= value < below:  # nor is it NaN
            p.error(f"--{name.replace('_', '-')} {value}: expected {least} or more, below {below}")
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype.replace("auto", "bfloat16" if "cuda" in args.device else "float32")
    args.micro_batch_size = min(args.micro_batch_size or args.batch_size, args.batch_size)
    args.trajectories = args.trajectories if args.temperature else 1  # greedy ones are all alike
    args.date = datetime.date.today().isoformat()  # for templates that print it; claim() keeps it
    return args

# ----------------------------- 2. Data: a file -> rows that know their place -> (context, response)
ROLES = dict(system="system", developer="system", user="user", human="user",  # OpenAI, ShareGPT
             assistant="assistant", gpt="assistant", model="assistant")
REPLY = dict(prompt="completion", question="answer", instruction="output", query="response",
             user_message="response")
ASKS = ("messages", "conversations", *REPLY)  # the keys that hold what is to be answered
MORE = "tools tool_calls function_call images image audio".split()  # than text

class Refused(SystemExit):
    """What the user gave cannot be used: this ends the run, or has the row skipped."""

def must(ok: object, expected: str, *found: object) -> None:  # `assert` is for faults of our own
    if not ok:
        raise Refused(f"expected {expected}, found {found[0]!r:.200}" if found else expected)

@contextlib.contextmanager
def expect(what: str):  # of a library, or of what a user gave it: it raises what it likes
    try:
        yield
    except Exception as error:
        raise Refused(f"expected {what}, found {error}")

def read_text(path: str | Path) -> str:  # what is not UTF-8 becomes surrogates: see Chat.refused
    return Path(path).read_bytes().decode("utf-8-sig", "surrogateescape").rstrip()

def parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Refused(f"expected JSON, found {error}")  # raised when, and if, its row is used

def read_rows(path: str) -> list[tuple[str, object]]:
    """Data file, or hub data set -> [(file:line, row)]; a row that cannot be parsed is Refused."""
    kind = Path(path).suffix.lower()
    text = read_text(path) if kind in (".jsonl", ".json", ".csv", ".txt") else ""
    rows = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if kind == ".csv":
        csv.field_size_limit(2 ** 31 - 1)  # of characters in a cell; by default 131,072
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", strict=True)
        try:  # the key "" gets cells beyond the header's
            rows = [(reader.line_num, {k.strip(): v for k, v in row.items()}) for row in reader]
        except csv.Error as error:
            must(False, f"{path}:{reader.reader.line_num}: expected CSV, found {error}")
    elif kind == ".json" and isinstance(array := parse_json(text), list):
        rows = [*enumerate(array, 1)]  # numbers of rows, as lines mean nothing here
    elif kind in (".jsonl", ".json"):
        rows = [(n, parse_json(line)) for n, line in rows]
    elif kind != ".txt":
        with expect(f"{path} to be a .jsonl, .json, .csv or .txt file, or a hub data set"):
            import datasets  # optional
            rows = [*enumerate(datasets.load_dataset(path, split="train"), 1)]
    must(rows, f"{path}: expected rows, found none")
    return [(f"{path}:{n}", row) for n, row in rows]

def plain_text(content: object, what: str) -> str:  # images, audio and the like are refused
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [isinstance(p, dict) and p.get("type") == "text" and p.get("text") for p in parts]
    must(all(isinstance(text, str) for text in texts), f"text as {what}", content)
    return "".join(texts)

def conversations(row: object) -> list[tuple[list[dict], str | None]]:
    """A row of any accepted shape -> [(messages, response)], one for each assistant turn, with the
    whole history before it; the response is None where it is to be sampled. Raises Refused."""
    if isinstance(row, Refused):
        raise row
    row = {"messages": row} if isinstance(row, (str, list)) else row
    ask = next((key for key in ASKS if isinstance(row, dict) and key in row), None)
    must(ask, f"an object with one of {', '.join(ASKS)}", row)
    must("" not in row, "a header for every cell; cells that hold commas need quotes", row.get(""))
    replies = [REPLY[ask], *REPLY.values()] if ask in REPLY else ["response"]  # its own kind first
    reply = next((row[key] for key in replies if row.get(key) is not None), None)
    if ask == "instruction" and (extra := row.get("input") or row.get("context")):  # Alpaca, Dolly
        row = row | {ask: plain_text(row[ask], ask) + "\n\n" + plain_text(extra, "input")}
    messages, roles, given = [], "", reply is not None
    for role, turns in (("system", row.get("system") or row.get("system_prompt") or []),
                        ("user", row[ask]), ("assistant", reply if given else [])):
        for turn in turns if isinstance(turns, list) else [{"role": role, "content": turns}]:
            role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
            must(role in [*ROLES], f"a message with a role of {', '.join(ROLES)}", turn)
            more = [key for key in MORE if row.get(key) or turn.get(key)]
            must(not more, "text alone, without tools, calls of them, images or audio", more)
            content = plain_text(turn.get("content", turn.get("value")), f"the {role} message")
            must(content.strip() or ROLES[role] == "assistant", f"text as the {role} message", "")
            messages.append({"role": ROLES[role], "content": content})
            roles += "A" if turn.get("weight") == 0 else ROLES[role][0]  # A: not to be trained on
    must(re.fullmatch("s?u(u|au)*" + ("a" if given else "a?"), roles, re.I), "a system message or "
         "none, a user's, then by turns, and in a reply an assistant's", roles)
    samples = [(messages[:i], m["content"]) for i, m in enumerate(messages)
               if roles[i] == "a" and (m is messages[-1] or not given)]  # or it is but context
    return samples + [(messages, None)] * (roles[-1] == "u")

# -------------------------- 3. Prompts: teacher ids, student ids, and the response ids both end in
@dataclasses.dataclass
class Example:
    """One response. The teacher reads teacher + response, the student reads student + response."""
    where: str  # file:line
    messages: list[dict]  # what the teacher reads, before the template
    teacher: list[int]
    student: list[int]
    response: list[int] | None  # None: to be sampled
    cut: bool = False  # it did not fit into the context
    held_out: bool = False
    rows: slice | None = None  # of the targets: one for each of its tokens
    question = property(lambda self: next(
        m["content"].strip() for m in self.messages if m["role"] == "user"))

class Chat:
    """Tokenizer, template, stop tokens and limits of a model: all that turns messages into ids."""

    def __init__(self, args: Args):
        self.args, name, trust = args, args.model, {"trust_remote_code": args.trust_remote_code}
        with expect(f"--model {name} to be a folder or hub name of a language model"):
            config = transformers.AutoConfig.from_pretrained(name, **trust)
            self.tokenizer = tokenizer = transformers.AutoTokenizer.from_pretrained(name, **trust)
        self.generation = transformers.GenerationConfig.from_model_config(config)
        with contextlib.suppress(OSError):  # the file is optional
            self.generation = transformers.GenerationConfig.from_pretrained(name)
        tokenizer.chat_template = args.chat_template or tokenizer.chat_template
        must(tokenizer.chat_template, f"{name} has no chat template: give --chat-template")
        size = lambda key, none=sys.maxsize: getattr(config.get_text_config(), key, None) or none
        self.limit, self.vocab = size("max_position_embeddings"), size("vocab_size")
        self.window = min(size("sliding_window"), size("window_size"))
        if "long_factor" in (rope := size("rope_parameters", {})):  # longrope: past its original
            self.limit = rope["original_max_position_embeddings"]  # a long row changes the others
        eos = [tokenizer.eos_token_id, *np.ravel(self.generation.eos_token_id).tolist()]
        eos = [i for i in eos if i in range(self.vocab)]  # nor is it None
        must(eos, f"{name} names no stop token: expected an eos_token_id")
        control = [re.escape(t.content) for t in tokenizer.added_tokens_decoder.values()
                   if t.special or re.fullmatch(r"<[|｜].+[|｜]>", t.content)]
        self.refused = re.compile("|".join([*control, "[\ud800-\udfff]"]))  # in any text
        self.ids = lambda text: tokenizer(text, add_special_tokens=False).input_ids
        self.text = lambda ids: tokenizer.decode([i for i in ids if i not in self.stops])
        self.stops, self.stop, self.lead = set(eos), eos[0], ""  # stop: the one that ends a turn
        probe = [{"role": r, "content": f"Some {r} text."} for r in ("system", "user", "assistant")]
        for self.folds, self.parts, i in ((0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 0, 0)):
            with contextlib.suppress(Refused):
                self.render(probe[:2])
                start, whole = self.render(probe[i:2]), self.render(probe[i:], answer=False)
                before, _, ending = whole.rpartition("Some assistant text.")
                self.stop = next((i for i in self.ids(ending) if i in self.stops), self.stop)
                lead = before.partition(start)[2]  # what it puts before answers
                self.lead = "" if re.search("think|thought", lead) else lead  # what is emitted
                break

    def render(self, messages: list[dict], answer: bool = True) -> str:
        """-> the template's text. Refused if it does not take the messages or loses a text."""
        if self.folds and messages[0]["role"] == "system":  # it goes into the user's first turn
            text = "\n\n".join(m["content"] for m in messages[:2])
            messages = [{"role": "user", "content": text}, *messages[2:]]
        asked = [m["content"].strip() for m in messages if m["role"] != "assistant"]
        if self.parts:
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        today = datetime.datetime.fromisoformat(self.args.date)  # the same when the run goes on
        transformers.utils.chat_template_utils.datetime = Args(now=lambda: today)
        with expect("messages (and --template-kwargs) that the chat template takes"):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer, **self.args.template_kwargs)
        lost = [a for a in asked if text.count(a) < "\0".join(asked).count(a)]  # also inside others
        must(not lost, "a chat template that shows every text", f"without {lost}")
        return text

def encode_response(chat: Chat, tail: str, response: str) -> list[int]:
    """Text -> the ids that the model would emit after a prompt ending in `tail`, and a stop id."""
    thinks = re.search(r"<\w+>\s*$|$", tail)[0]  # a tag that the prompt has opened already
    response = response.removeprefix(thinks).removeprefix(thinks.strip()).removeprefix(chat.lead)
    for before in (tail or ":", ":", ""):  # the start of a text is marked by some tokenizers, and
        start, ids = chat.ids(before), chat.ids(before + chat.lead + response)  # here is none; but
        if ids[:len(start)] == start:  # over the seam of tail and response nothing must merge
            return ids[len(start):] + [chat.stop]

def build_example(where: str, messages: list, response, ids, chat: Chat, args: Args) -> Example:
    """One (context, response), and the `ids` that a run has sampled -> token ids for both sides."""
    system = lambda text: [{"role": "system", "content": text}] * bool((text or "").strip())
    messages = system(args.prompt) + messages
    prompts = [m["role"] for m in messages].count("system")
    must(prompts == 1, "one prompt to bake, a system message or --prompt", prompts)
    sides = messages, system(args.student_prompt) + messages[1:]
    kept = isinstance(ids, list) and all(type(i) is int and 0 <= i < chat.vocab for i in ids)
    kept = kept and chat.text(ids) == response  # ids may hold control tokens, text may not
    texts = [m["content"] for m in sum(sides, [])] + [response or ""] * (not kept)
    found = chat.refused.search("\n".join(texts))
    must(not found, "UTF-8 text without control tokens of this model", found and found[0])
    rendered = [chat.render(side) for side in sides]
    tails = [text.rpartition(messages[-1]["content"].strip())[2] for text in rendered]
    must(tails[0] == tails[1], "the template to end both prompts alike", tails)
    teacher, student = map(chat.ids, rendered)
    room = chat.limit - max(len(teacher), len(student))
    must(room > 0, f"a prompt of less than {chat.limit} tokens, which is the context", len(teacher))
    ids = ids if kept else response and encode_response(chat, tails[0], response)
    must(not ids or not chat.stops & {*ids[:-1]}, "a response without stop tokens in it", response)
    return Example(where, messages, teacher, student, ids and ids[:room], len(ids or "") > room)

def build_examples(rows: list, chat: Chat, args: Args, drops: dict) -> list[Example]:
    """Rows -> examples. `drops` gets the places of what is left out, by reason."""
    examples = []
    for where, row in rows:
        try:
            said, ids = conversations(row), row.get("ids") if isinstance(row, dict) else None
            full = [turn for turn in said if turn[1] is None or turn[1].strip()]
            examples += [build_example(where, *turn, ids, chat, args) for turn in full]
            drops["expected a response with text"] += [where] * (len(said) - len(full) or not said)
        except Refused as error:
            must(args.skip_bad_rows, f"{where}: {error}")
            drops[str(error).split(", found")[0]].append(where)
    must(examples, f"{where}: of all rows none is left: {dict(drops)!r:.900}")
    return examples

def split(examples: list[Example], apart: list[Example], args: Args, drops: dict) -> list[Example]:
    """Marks what is held out: a share of the questions, or those of `apart`, of --eval-data."""
    order = lambda question: hashlib.sha256(f"{args.seed} {question}".encode()).digest()
    questions = sorted({e.question for e in examples}, key=order)
    count = min(math.ceil(args.eval_fraction * len(questions)), len(questions) - 1)
    held = {e.question for e in apart} or {*questions[:count]}
    for e in examples + apart:  # so all responses to a question are on one side
        e.held_out = e.question in held
    both = [e.where for e in examples if apart and e.held_out]  # asked in either file
    drops["expected a question that is not held out"] += both
    return [e for e in examples if not (apart and e.held_out)] + apart

# --------------------------- 4. Sampling: the prompted model answers the rows that have no response
def generate(model, chat: Chat, prompts: list, prefix: tuple, most: int, temperature) -> list:
    """B prompts -> B continuations of at most `most` ids, each cut after its first stop id."""
    width = max(map(len, prompts))  # T: the prefix, padding, the rest of a prompt, ending flush
    # padding in the middle would take up a sliding window: without a prefix it is all on the left
    n, cache = prefix if width + most <= chat.window else NO_PREFIX
    ids = torch.tensor([p[:n] + [chat.stop] * (width - len(p)) + p[n:] for p in prompts])  # (B, T)
    mask = torch.tensor([[1] * n + [0] * (width - len(p)) + [1] * (len(p) - n) for p in prompts])
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
    model.generation_config = transformers.GenerationConfig(  # its own would fill in what is unset
        max_new_tokens=min(most, chat.limit - width), do_sample=temperature > 0,
        pad_token_id=chat.stop, eos_token_id=sorted(chat.stops), **sampling)
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                         **cache(len(ids)))[:, width:].tolist()
    return [row[:next((i for i, t in enumerate(row, 1) if t in chat.stops), None)] for row in out]

def sample_responses(model, chat: Chat, examples: list, prefix, path, args: Args, drops) -> list:
    """An example without a response -> --trajectories examples with one, by way of the file."""
    asked = [copy.copy(e) for e in examples if e.response is None for _ in range(args.trajectories)]
    if not asked:
        return examples
    asked.sort(key=lambda e: -len(e.teacher))  # the longest first: what does not fit fails at once
    size = 4 * args.batch_size  # generating takes less memory than training
    with path.open("a+b") as file, teacher_mode(model):
        file.seek(0)
        lines = [line for line in file if line.endswith(b"\n")]  # the last may be torn
        done = len(lines) if len(lines) >= len(asked) else len(lines) // size * size  # batches
        file.truncate(sum(map(len, lines[:done])))
        for i in tqdm(range(done, len(asked), size), "sampling", unit="batch"):
            torch.manual_seed(args.seed + i)  # the same samples, whether interrupted or not
            prompts = [e.teacher for e in asked[i:i + size]]
            out = generate(model, chat, prompts, prefix, args.max_new_tokens, args.temperature)
            lines[i:] = [json.dumps(  # a row of --data, and the ids that it stands for
                {"messages": e.messages, "response": chat.text(ids), "ids": ids},
                ensure_ascii=False).encode() + b"\n" for e, ids in zip(asked[i:], out)]
            file.writelines(lines[i:])
            file.flush()
    for e, line in zip(asked, lines):
        e.response = json.loads(line)["ids"]
        e.cut = len(e.response) < args.max_new_tokens and e.response[-1] not in chat.stops
        drops["expected a sampled response with text"] += [e.where] * (chat.stops >= {*e.response})
    return [e for e in examples + asked if {*(e.response or ())} - chat.stops]

# ---------------------------------------------------------------------------------------- 5. Loss
def log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # in bf16 KL can be < 0
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)  # spares a copy

def token_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor,
             temperature: float = 1.0) -> torch.Tensor:
    """(n, V), (n, V) -> (n,) KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) in nats, for teacher p and
    student q over the whole vocabulary, in fp32 or better."""
    log_q, log_p = log_probs(student_logits, temperature), log_probs(teacher_logits, temperature)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

class ChunkedKL(torch.autograd.Function):
    """token_kl of head(student) and head(teacher), (M, D) each -> (M,), 0 but at the (N,) `rows`.

    KL_i depends on row i alone, so its gradient is formed in the forward pass, while the chunk's
    logits are there: ∂KL_i / ∂logits_i = (q_i − p_i) / temperature, and through the head to the
    hidden state. Memory is that gradient and a few (chunk, V) tensors, whatever N is."""

    @staticmethod
    def forward(ctx, student, teacher, rows, head, temperature, chunk):
        learn, wide = ctx.needs_input_grad[0], torch.promote_types(student.dtype, torch.float32)
        kl, ctx.grad = student.new_zeros(len(student), dtype=wide), torch.zeros_like(student)
        for part in rows.split(chunk):
            hidden = student[part].requires_grad_(learn)
            with torch.set_grad_enabled(learn):
                logits = head(hidden)  # (chunk, V)
            log_q = log_probs(logits.detach(), temperature)
            log_p = log_probs(head(teacher[part]), temperature)
            p = log_p.exp()
            kl[part] = torch.linalg.vecdot(p, log_p.sub_(log_q))
            if learn:
                slope = log_q.exp_().sub_(p).to(logits.dtype)  # (chunk, V): q - p
                ctx.grad[part] = torch.autograd.grad(logits, hidden, slope)[0] / temperature
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        grad, ctx.grad = ctx.grad, None  # scaled in place, so it serves once
        return grad.mul_(slope[:, None]), None, None, None, None, None

def batched_kl(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, head,
               temperature: float = 1.0, chunk: int | None = None) -> torch.Tensor:
    """(B, R, D) hidden states of each side, (B, R) bool mask of real response tokens -> (B,) the
    mean over a sample's tokens of KL(teacher ‖ student), in nats; 0 for a sample without tokens.
    head: (n, D) -> (n, V) logits, frozen; padded rows never reach it. chunk: rows at a time."""
    rows = mask.flatten().nonzero().squeeze(1)  # (N,); a mask on the CPU spares a wait for the GPU
    rows, counts = (x.to(student.device, non_blocking=True) for x in (rows, mask.sum(1)))
    kl = ChunkedKL.apply(student.flatten(0, 1), teacher.flatten(0, 1), rows, head, temperature,
                         chunk or (512 if student.is_cuda else 128))  # (B * R,)
    return kl.view(mask.shape).sum(1) / counts.clamp(min=1)

# ----------------------------------------------------------------- 6. Model: one network, two parts
def load_model(args: Args) -> tuple:
    """-> the model with adapters, in eval mode, and its frozen head: hidden states -> logits."""
    with expect(f"--model {args.model} to load on --device {args.device} as {args.dtype}"):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code).to(args.device)
    names = [] if args.target_modules == "all-linear" else re.split(r"\s*,\s*", args.target_modules)
    ends = {base.get_input_embeddings(), base.get_output_embeddings()}
    for name in names:
        found = {module for path, module in base.named_modules() if f".{path}".endswith(f".{name}")}
        must(found and not found & ends, f"--target-modules {name}: expected a layer's own modules")
    torch.manual_seed(args.seed)  # of the LoRA matrices
    config = peft.LoraConfig("CAUSAL_LM", r=args.rank, lora_alpha=args.alpha,
                             target_modules=names or "all-linear")
    with expect(f"--target-modules {args.target_modules} to be linear layers"):
        model = peft.get_peft_model(base, config).eval()
    config.target_modules = sorted(config.target_modules)  # of a set, in another order in each run
    for layer in model.modules() if args.gradient_checkpointing else ():
        if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
            layer.forward = functools.partial(  # in eval mode too, where dropout is off
                torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
    head, ids = make_head(base), torch.arange(8, device=args.device)[None]  # (1, T)
    with torch.no_grad():
        logits, ours = base(input_ids=ids).logits, head(hidden_states(model, ids))  # (1, T, V)
    must((ours - logits).abs().max() < 1e-2 * logits.abs().max(), f"--model {args.model}: make_head"
         " does not know how this kind of model makes logits of its last hidden states")
    return model, head

def make_head(base):  # (n, D) hidden states -> (n, V) logits, with the maps some models put around
    config, linear = base.config.get_text_config(), base.get_output_embeddings()
    scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2; scale: Cohere, Granite
    logits = lambda hidden: linear(hidden * scale)
    return (lambda hidden: torch.tanh(logits(hidden) / cap) * cap) if cap else logits

@contextlib.contextmanager
def teacher_mode(model):  # adapters and dropout off, no gradients; the mode is restored
    training = model.training
    with torch.no_grad(), model.eval().disable_adapter():
        yield
    model.train(training)

def hidden_states(model, ids: torch.Tensor, **cache) -> torch.Tensor:
    """(B, T) right-padded ids -> (B, T, D) final hidden states, on top of a KV cache if given."""
    trunk = model.get_base_model().base_model  # causal: padding on the right needs no mask
    return trunk(input_ids=ids, use_cache=bool(cache), **cache).last_hidden_state

def response_states(model, examples: list, side: str, prefix: tuple = NO_PREFIX) -> list:
    """-> the hidden states at [s-1, e-1), which predict the response [s, e): B of (length, D)."""
    prompts = [getattr(e, side)[prefix[0]:] for e in examples]
    ids = [torch.tensor(p + e.response[:-1]) for p, e in zip(prompts, examples)]  # last: not read
    ids = pad_sequence(ids, True).to(model.device, non_blocking=True)  # (B, T)
    hidden = hidden_states(model, ids, **prefix[1](len(ids)))  # (B, T, D)
    return [h[len(p) - 1:][:len(e.response)] for h, p, e in zip(hidden, prompts, examples)]

def shared_prefix(model, examples: list) -> tuple:
    """-> (how many tokens all teacher prompts start with, B -> the argument with their KV cache)"""
    common = os.path.commonprefix([e.teacher[:-1] for e in examples])  # leaves a token to read
    trunk, ids = model.get_base_model().base_model, torch.tensor([common], device=model.device)

    def copies(B: int) -> dict:  # a call changes the cache that it gets
        own = copy.deepcopy(cache)
        own.batch_repeat_interleave(B)
        return {name: own}
    try:
        must(common, "prompts that start alike", "none")
        with teacher_mode(model):
            _, (name, cache), *_ = trunk(input_ids=ids, use_cache=True).items()  # whatever its name
        must(copies(2)[name].get_seq_length() == len(common), "a KV cache", "none")
        return len(common), copies
    except (Refused, AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        print(f"no prefix is shared ({error}): the teacher reads every prompt in full")
        return NO_PREFIX

# ------------------------------------------------- 7. Targets: what the teacher says, once for all
def by_length(examples: list, size: int, side: str = "student") -> list:  # so little is padded
    examples = sorted(examples, key=lambda e: len(getattr(e, side)) + len(e.response))
    return [examples[i:i + size] for i in range(0, len(examples), size)]

def teacher_targets(model, examples: list, prefix: tuple, path: Path, args: Args) -> torch.Tensor:
    """-> (N, D) final hidden states of the teacher, in a file, not in memory; sets example.rows."""
    groups, N = by_length(examples, args.batch_size, "teacher"), 0
    for e in (e for group in groups for e in group):
        e.rows = slice(N, N + len(e.response))
        N = e.rows.stop
    D, dtype = model.get_output_embeddings().weight.shape[1], model.dtype
    with path.open("a") as file:  # a full disk is an error here, not a SIGBUS later on
        getattr(os, "posix_fallocate", lambda *_: 0)(file.fileno(), 0, N * D * dtype.itemsize)
    targets = torch.from_file(str(path), True, N * D, dtype=dtype).view(N, D)
    todo = [g for g in groups if not all(targets[e.rows].all() for e in g)]  # a 0: not yet written
    with teacher_mode(model):
        for group in tqdm(todo, "targets", unit="batch"):
            for e, states in zip(group, response_states(model, group, "teacher", prefix)):
                targets[e.rows] = states
    return targets

def both_states(model, examples: list, targets: torch.Tensor) -> list[torch.Tensor]:
    """-> the student's and the teacher's hidden states, (B, R, D) each, and the (B, R) mask."""
    student = pad_sequence(response_states(model, examples, "student"), True)
    teacher = pad_sequence([targets[e.rows] for e in examples], True)
    mask = pad_sequence([torch.ones(len(e.response), dtype=torch.bool) for e in examples], True)
    return student, teacher.to(student.device, non_blocking=True), mask

# ------------------------------------------------------------------------------------ 8. Training
def batches(examples: list, args: Args, epoch: int) -> list[list[Example]]:
    """The batches of an epoch, shuffled: a pure function of (seed, epoch)."""
    rng, size = np.random.default_rng([args.seed, epoch]), args.batch_size
    order = [examples[i] for i in rng.permutation(len(examples))]
    pools = [order[i:i + 8 * size] for i in range(0, len(order), 8 * size)]  # sorted by length
    out = [batch for pool in pools for batch in by_length(pool, size)]
    return [out[i] for i in rng.permutation(len(out))]

@torch.no_grad()
def evaluate(model, head, examples: list, targets: torch.Tensor, args: Args) -> dict:
    """-> KL, nats per token, and the share of tokens where both sides put the same first."""
    scores = []  # (KL, top-1) of each sample
    for batch in by_length(examples, args.micro_batch_size):
        states = both_states(model, batch, targets)
        for kl, s, t, m in zip(batched_kl(*states, head).tolist(), *states):
            top1 = head(s[m]).argmax(-1) == head(t[m]).argmax(-1)  # (its tokens,)
            scores.append((kl, top1.float().mean().item()))
    kl, top1 = np.mean(scores, 0).tolist()  # means over samples of means over tokens
    must(math.isfinite(kl), f"held-out KL is {kl}: try --dtype float32")
    return {"eval_kl": kl, "eval_top1": top1}

def train_step(model, head, batch: list, targets, params: list, args: Args) -> torch.Tensor:
    """Leaves the clipped gradient of the mean KL in `params` -> [KL, its norm before clipping]."""
    total = 0.0  # then a tensor on the device: nothing in here waits for it
    for part in by_length(batch, args.micro_batch_size):
        kl = batched_kl(*both_states(model, part, targets), head, args.kl_temperature).sum()
        (kl / len(batch)).backward()
        total += kl.detach() / len(batch)
    return torch.stack([total, torch.nn.utils.clip_grad_norm_(params, 1.0)])

def learning_rate(step: int, steps: int, args: Args) -> float:
    """Of step 1..steps: a linear rise, then half a cosine down to 0."""
    warmup = math.ceil(args.warmup * steps)
    fall = math.pi * max(step - warmup, 0) / (steps - warmup + 1)
    return args.lr * min(step / max(warmup, 1), 0.5 + 0.5 * math.cos(fall))

def train(model, head, examples: list, targets, args: Args, out: Path) -> list[dict]:
    """Trains the adapters on what is not held out -> a dict a step, as in OUT/metrics.jsonl."""
    trained, held_out = ([e for e in examples if e.held_out == side] for side in (False, True))
    plan = [batch for epoch in range(args.epochs) for batch in batches(trained, args, epoch)]
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, log = torch.optim.AdamW(params.values(), weight_decay=0.0), []
    if (out / "checkpoint.pt").exists():  # order and lr are functions of the step, so this is all
        weights, state, log = torch.load(out / "checkpoint.pt", weights_only=True)
        model.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(state)
    per_epoch, saved = len(plan) // args.epochs, len(log) - 1
    bar = tqdm(range(len(log), len(plan) + 1), "training", unit="step")
    for step in bar:  # step 0 only evaluates
        entry, start = {"step": step, "epoch": math.ceil(step / per_epoch)}, time.perf_counter()
        log.append(entry)
        if step:
            batch, lr = plan[step - 1], learning_rate(step, len(plan), args)
            kl, norm = train_step(model, head, batch, targets, list(params.values()), args).tolist()
            must(math.isfinite(kl + norm), f"step {step}: KL {kl}, gradient norm {norm}, in "
                 f"{', '.join(e.where for e in batch)}; {out} holds step {saved}")
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            speed = round(sum(len(e.response) for e in batch) / (time.perf_counter() - start))
            entry |= {"kl": kl, "lr": lr, "grad_norm": norm, "tokens_per_s": speed}
            bar.set_postfix(entry)
        if held_out and step % per_epoch == 0:
            entry |= evaluate(model, head, held_out, targets, args)
            bar.write(f"step {step}: held-out KL {entry['eval_kl']:.4f}")
        if step % args.save_every == 0 or step % per_epoch == 0:
            file, saved = io.BytesIO(), step
            torch.save(({n: p.data for n, p in params.items()}, optimizer.state_dict(), log), file)
            write_whole(out / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in log))
            write_whole(out / "checkpoint.pt", file.getvalue())
    return log

# -------------------------------------------------------------------------------------- 9. Report
def samples(model, chat: Chat, examples: list, args: Args) -> list[dict]:
    """Three held-out questions, answered greedily by the base, prompted and baked model."""
    held_out = [e for e in examples if e.held_out] or examples
    shown = list({e.question: e for e in held_out}.values())[:3]
    table = [{"question": e.messages[-1]["content"]} for e in shown]
    for who, side in (("base", "student"), ("prompted", "teacher"), ("baked", "student")):
        prompts = [getattr(e, side) for e in shown]
        with contextlib.nullcontext() if who == "baked" else teacher_mode(model):
            out = generate(model, chat, prompts, NO_PREFIX, args.max_new_tokens, 0.0)
        table = [row | {who: chat.text(ids)} for row, ids in zip(table, out)]
    return table

def make_report(examples: list, read: int, drops: dict, log: list, args: Args) -> dict:
    """Every number that the terminal, the card and a paper show, and plain words on them."""
    report = {"rows_read": read, "rows_used": len({e.where for e in examples}),
              "rows_dropped": sum(map(len, drops.values())),
              "responses_cut": sum(e.cut for e in examples), "steps": log[-1]["step"]}
    for held, side in enumerate(("trained", "held_out")):
        part = [e for e in examples if e.held_out == held]
        counts = len({e.question for e in part}), len(part), sum(len(e.response) for e in part)
        report |= zip((f"{side}_questions", f"{side}_responses", f"{side}_tokens"), counts)
    report |= {"kl_before": log[0].get("eval_kl"), "kl_after": log[-1].get("eval_kl"),
               "top1_before": log[0].get("eval_top1"), "top1_after": log[-1].get("eval_top1")}
    before, after = (log[i].get("eval_kl", math.nan) for i in (0, -1))  # NaN: no such note
    report["recovered"] = 1 - after / before if before >= NOISE else None
    best = min(m.get("eval_kl", math.inf) for m in log[1:])
    trained = np.mean([m["kl"] for m in log[-len(log) // 10:]])  # over the last tenth of the steps
    prompts = list(dict.fromkeys(e.messages[0]["content"] for e in examples))
    notes = {f"dropped {len(at)}: {why} (first: {at[0]})": at for why, at in drops.items() if at}
    notes |= {  # what to say: whether it holds
        f"KL before is under {NOISE}: the prompt does nothing here to bake": before < NOISE,
        "held-out KL rose, the bake failed: try a lower --lr": after > before,
        "less than a fifth was recovered: try more rows or --epochs, or a higher --lr or --rank":
            max(0.8 * before, NOISE) < after <= before,
        f"an epoch had KL {best:.4f}: try fewer --epochs": best < 0.9 * after,
        f"training KL is {trained:.4f}, far below held-out KL: try more rows or fewer --epochs":
            trained < 0.5 * after and args.kl_temperature == 1,
        "fewer than 5 questions held out: rough numbers": report["held_out_questions"] < 5,
        f"{len(prompts)} different prompts were baked; the first of them is shown": prompts[1:]}
    return report | {"prompt": prompts[0], "notes": [n for n, holds in notes.items() if holds]}

def report_text(report: dict) -> str:
    lines = [f"{name.replace('_', ' '):20}{value:{'10.4f' if isinstance(value, float) else '10'}}"
             for name, value in report.items() if isinstance(value, (int, float))]
    lines += report["notes"]
    for sample in report["samples"]:
        lines += ["", *(f"{who:>8}: {text}" for who, text in sample.items())]
    return "\n".join(lines)

def curve(log: list[dict]) -> str:
    """KL by step as an SVG image: training in blue, held-out questions in red."""
    steps, top = log[-1]["step"], max(m.get(k, 0) for m in log for k in ("kl", "eval_kl")) or 1
    blue, red = (" ".join(f"{600 * m['step'] / steps:.0f},{200 - 195 * m[key] / top:.0f}"
                          for m in log if key in m) for key in ("kl", "eval_kl"))
    return ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 200" fill="none"><polyline'
            f' points="{blue}" stroke="#36c"/><polyline points="{red}" stroke="#c33"/></svg>')

def model_card(report: dict) -> str:  # peft adds the rest of the metadata when it saves
    text = "\n    ".join(f"{report['prompt']}\n\n{report_text(report)}".splitlines())  # inert
    return f"""---\nbase_model: null\n---
With this LoRA adapter the model answers without a system prompt as it would with the one below.
Made by bake.py (arXiv:2409.13697) with the settings in args.json. Load it with
`peft.AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")`. KL is in nats per token.

![KL by step, down to 0: training in blue, held-out questions in red](kl.svg)

    {text}
"""

# ---------------------------------------------------------------------- 10. Files: whole, or absent
def write_whole(path: Path, data: str | bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(data if isinstance(data, bytes) else data.encode())
    os.replace(part, path)  # whoever finds `path` finds all of it

def claim(out: Path, args: Args) -> tuple:
    """Makes sure that OUT is this run's, and nobody else's now -> (lock, text for args.json)."""
    out.mkdir(parents=True, exist_ok=True)
    lock, file = open(out / ".lock", "w"), out / "args.json"
    with expect(f"--out {out} to be free: another run is at work there"):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    must(file.exists() or {*os.listdir(out)} <= {".lock", "args.json.part"},
         f"--out {out} holds files of something else: expected a new folder, or an earlier run's")
    read = lambda name: Path(name).read_bytes() if os.path.isfile(name) else name.encode()
    said = {"prompt": (args.prompt or "").encode(errors="replace"), "data": read(args.data),
            "eval_data": read(args.eval_data or ""), "bake.py": read(__file__)}
    new = vars(args) | {f"sha256 of {n}": hashlib.sha256(x).hexdigest() for n, x in said.items()}
    new["versions"] = {m.__name__: m.__version__ for m in (torch, transformers, peft, np)}
    old = json.loads(file.read_text()) if file.exists() else new
    args.date = new["date"] = old["date"]
    other = {name: f"{name}: {old.get(name)!r:.200} there, {new[name]!r:.200} here"
             for name in new if old.get(name) != new[name]}
    for name in other.keys() & {"out", "versions", "sha256 of bake.py"}:  # may change
        print(f"changed since {out} began: {other.pop(name)}")
    must(not other, f"--out {out} is another run's: {'; '.join(other.values())}")
    return lock, json.dumps(new, indent=2)

# ---------------------------------------------------------------------------------------- 11. main
def main(argv: list[str] | None = None) -> dict:
    """Runs, goes on with, or shows what the command line asks for -> its report."""
    args, drops = parse_args(argv), collections.defaultdict(list)
    out = Path(args.out)
    lock, identity = claim(out, args)  # held until the end
    if not (out / "report.json").exists():
        chat, raw = Chat(args), [read_rows(f) for f in (args.data, args.eval_data) if f is not None]
        examples, *apart = [build_examples(rows, chat, args, drops) for rows in raw]
        examples = split(examples, sum(apart, []), args, drops)
        for side in ("teacher", "student"):
            text = chat.tokenizer.decode(getattr(examples[0], side))
            print(f"--- the {side} reads, in {examples[0].where}:\n{text}")
        if chat.folds:
            print("--- the template takes no system message: it is put into the user's turn")
        model, head = load_model(args)
        write_whole(out / "args.json", identity)  # not before: a refused run leaves OUT free
        prefix, path = shared_prefix(model, examples), out / "trajectories.jsonl"
        examples = sample_responses(model, chat, examples, prefix, path, args, drops)
        must({e.held_out for e in examples} >= {False, bool(args.eval_data)},
             "no response is left to train on, or of --eval-data")
        targets = teacher_targets(model, examples, prefix, out / "targets", args)
        log = train(model, head, examples, targets, args, out)
        report = make_report(examples, sum(map(len, raw)), drops, log, args)
        report["samples"] = samples(model, chat, examples, args)
        write_whole(out / "kl.svg", curve(log))
        write_whole(out / "README.md", model_card(report))
        model.save_pretrained(out)
        chat.tokenizer.save_pretrained(out)
        if args.merge:
            for part in (model.merge_and_unload(), chat.generation, chat.tokenizer):
                part.save_pretrained(out / "merged")  # generate() had given the model another
        write_whole(out / "report.json", json.dumps(report, indent=2))  # from here on it is done
    for name in ("targets", "checkpoint.pt"):  # work in progress, and large
        (out / name).unlink(missing_ok=True)
    report = json.loads((out / "report.json").read_text())
    print(f"--- {out} is done\n{report_text(report)}")
    return report

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (KeyboardInterrupt, OSError, torch.OutOfMemoryError) as error:
        hint = "to use less: --micro-batch-size 1, --gradient-checkpointing; "
        sys.exit(f"\n{str(error) or 'stopped'}; {hint * isinstance(error, torch.OutOfMemoryError)}"
                 "what is done is kept in --out: the same command goes on from there")
