#!/usr/bin/env python3
"""Bake a system prompt into the weights of a language model (prompt baking, arXiv:2409.13697).

For a model θ and a system prompt u, train LoRA weights θ_u with which the model without the prompt
predicts what it would predict with it, for the tokens of a response y to x:

    P_θu(y | x) ≈ P_θ(y | u, x)    by minimising    KL( P_θ(·|u,x) ‖ P_θu(·|x) )

One network plays both parts: the teacher has its adapters off and sees u, the student has them on
and does not. The KL is exact, and as cheap as plain fine-tuning however long u is, because
  1. the teacher is frozen: its final hidden states are computed once and kept in a file;
  2. teacher prompts start alike: the KV cache of what they share is computed once;
  3. only positions that predict the response meet the head, a chunk of rows at a time, and each
     chunk forms its gradient before the next chunk's logits take its place.

    $ python bake.py --model Qwen/Qwen3-0.6B --data examples/pirate.jsonl
    $ python bake.py --model DIR --data questions.txt --prompt "You are ..." --out runs/mine

Left out: top-k approximations of the KL, sampling inside the training step, full fine-tuning.
Shapes: B samples, T tokens, R response tokens, D hidden size, V vocabulary, N tokens to predict.
"""
import argparse, contextlib, copy, csv, datetime, fcntl, functools, hashlib  # noqa: E401
import importlib.util, inspect, json, math, os, re, shutil, signal, sys, time  # noqa: E401
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as brief

import numpy as np
import peft
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import chat_template_utils

Args = argparse.Namespace
NOISE = 1e-3  # nats per token: a prompt that moves the model by less does nothing to bake

# -------------------------------------------------------------------------------- 1. Command line

def parse_args(argv: list[str] | None = None) -> Args:
    """Command line -> namespace, with `auto` resolved and --prompt-file read into `prompt`."""
    p = argparse.ArgumentParser(prog="bake.py", description=__doc__.split("\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    group = p.add_argument_group("what to bake")
    flag, either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    flag("--model", required=True, help="folder or hub name of a causal language model")
    flag("--data", required=True, help=".jsonl .json .csv .txt (a question a line) or hub data set")
    either("--prompt", help="the system prompt to bake; without it, each row's own system message")
    either("--prompt-file", help="a file that holds the system prompt")
    flag("--student-prompt", help="a system message that the student keeps")
    flag("--chat-template", help="a Jinja file to use instead of the tokenizer's chat template")
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
    flag("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
         help="auto: bfloat16 on CUDA, else float32")
    flag("--device", default="auto", help="auto: cuda if there is one, else cpu")
    flag("--seed", type=int, default=0, help="of split, sampling, LoRA and data order")
    flag("--out", default="runs/bake", help="folder for adapter, report and work in progress")
    flag("--merge", action="store_true", help="also write OUT/merged, a model without adapters")
    flag("--trust-remote-code", action="store_true", help="run code that the model's folder brings")
    args = p.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name in ("temperature", "warmup", "eval_fraction", "seed") else 1e-9
        most = 1 - 1e-9 if name in ("warmup", "eval_fraction") else sys.maxsize
        if type(value) in (int, float) and not least <= value <= most:
            p.error(f"--{name.replace('_', '-')} {value}: expected a number from {least} to {most}")
    args.prompt = read_text(args.prompt_file).strip() if args.prompt_file else args.prompt
    must(args.prompt is None or args.prompt.strip(), "the prompt is empty: expected text")
    must(isinstance(args.template_kwargs, dict), "--template-kwargs: expected a JSON object")
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype.replace("auto", "bfloat16" if "cuda" in args.device else "float32")
    args.micro_batch_size = min(args.micro_batch_size or args.batch_size, args.batch_size)
    args.trajectories = args.trajectories if args.temperature else 1  # greedy ones are all alike
    args.date = datetime.date.today().isoformat()  # for templates that print it; claim() keeps it
    return args

# ----------------------------- 2. Data: a file -> rows that know their place -> (context, response)

ROLES = dict(system="system", developer="system", user="user", human="user",
             assistant="assistant", gpt="assistant", model="assistant")
REPLIES = {"prompt": "completion", "question": "answer", "instruction": "output",
           "user_message": "response"}  # each question takes its own reply first, then any
ASKS = ("messages", "conversations", *REPLIES)

class BadRow(ValueError):
    """A row that cannot be used. The message says what was found and what was expected."""

def need(ok: object, message: str, error: type = BadRow) -> None:
    if not ok:
        raise error(message)

def must(ok: object, message: str) -> None:
    need(ok, message, SystemExit)

def read_text(path: str | Path) -> str:
    # a byte that is not UTF-8 becomes a surrogate, which plain_text refuses, with its row's place
    return Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")

def parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return BadRow(f"expected JSON, found {error}")

def read_rows(path: str) -> list[tuple[str, object]]:
    """A data file or hub data set -> [(file:line, row)]; a row that cannot be parsed is a BadRow.
    In a .json array a row's line is its number; a .json file of another kind holds JSON lines."""
    kind = Path(path).suffix.lower()
    if kind not in (".jsonl", ".json", ".csv", ".txt"):
        must(not os.path.exists(path), f"{path}: expected .jsonl, .json, .csv or .txt")
        must(importlib.util.find_spec("datasets"), f"{path}: no file; is `datasets` installed?")
        import datasets
        rows = list(enumerate(datasets.load_dataset(path, split="train"), 1))
    else:
        must(os.path.isfile(path), f"{path}: no such file")
        text = read_text(path)
        lines = text.split("\n")  # not splitlines: JSON strings may hold U+2028
        rows = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
        if kind == ".csv":
            csv.field_size_limit(2 ** 31 - 1)
            reader = csv.DictReader((line + "\n" for line in lines), restkey="", strict=True)
            try:
                reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
                rows = [(reader.line_num, cells) for cells in reader]
            except csv.Error as error:
                raise SystemExit(f"{path}:{reader.reader.line_num}: expected CSV, found {error}")
        elif kind == ".json" and text.lstrip().startswith("["):
            array = parse_json(text)
            rows = list(enumerate(array, 1)) if isinstance(array, list) else [(1, array)]
        elif kind != ".txt":
            rows = [(n, parse_json(line)) for n, line in rows]
    must(rows, f"{path}: expected rows, found none")
    return [(f"{path}:{n}", row) for n, row in rows]

def plain_text(content: object, what: str) -> str:
    """Text, or a list of text parts, as one string."""
    if isinstance(content, list):
        kinds = {brief(part.get("type") if isinstance(part, dict) else [part]) for part in content}
        need(kinds <= {"'text'"}, f"{what} has parts {' '.join(sorted(kinds))}: only text is baked")
        content = "".join(plain_text(part.get("text"), what) for part in content)
    need(isinstance(content, str), f"{what} is {brief(content)}: expected text")
    need(not re.search("[\ud800-\udfff]", content), f"{what} is not valid UTF-8")
    return content

def read_messages(turns: object, role: str) -> list[dict]:
    """Text of `role`, or OpenAI or ShareGPT messages -> [{role, content}], content a string."""
    messages = []
    for turn in turns if isinstance(turns, list) else [{"role": role, "content": turns}]:
        need(isinstance(turn, dict), f"expected a message with a role, found {brief(turn)}")
        need(not turn.get("tool_calls"), "a message has tool calls: only text can be baked")
        role = str(turn.get("role", turn.get("from")))
        need(role in ROLES, f"found the role {role!r}: expected one of {', '.join(ROLES)}")
        content = plain_text(turn.get("content", turn.get("value")), f"the {role} message")
        need(content.strip() or ROLES[role] == "assistant", f"the {role} message is empty")
        messages.append({"role": ROLES[role], "content": content})
    return messages

def conversations(row: object) -> list[tuple[list[dict], str | None]]:
    """A row of any accepted shape -> [(messages, response)], one for each assistant turn, with the
    whole history before it; the response is None where it is to be sampled. Raises BadRow."""
    need(not isinstance(row, BadRow), str(row))
    row = {"messages": row} if isinstance(row, (str, list)) else row
    need(isinstance(row, dict), f"expected an object, found {brief(row)}")
    need("" not in row, "more cells than the header has: cells that hold commas need quotes")
    need(not row.get("tools"), "the row has tools: only text can be baked")
    ask = next((key for key in ASKS if key in row), None)
    need(ask, f"found the keys {brief(list(row))}: expected one of {', '.join(ASKS)}")
    replies = [REPLIES[ask], *REPLIES.values()] if ask in REPLIES else ["response"]
    reply = next((key for key in replies if row.get(key) is not None), None)
    asked = read_messages(row[ask], "user")
    if ask == "instruction" and asked and row.get("input"):
        asked[-1]["content"] += "\n\n" + plain_text(row["input"], "input")
    messages = read_messages(row.get("system") or [], "system") + asked
    messages += read_messages(row[reply], "assistant") if reply else []
    roles = [m["role"] for m in messages]  # su... where a user message stands before each answer
    order = re.fullmatch("s?u(u|au)*" + ("a" if reply else "a?"), "".join(r[0] for r in roles))
    need(order, f"found the roles {brief(roles)}: expected at most one system message, then a "
         "user's, then by turns, and in a reply the assistant's")
    samples = [(messages[:i], m["content"]) for i, m in enumerate(messages) if roles[i][0] == "a"]
    return samples[-1:] if reply else samples + [(messages, None)] * (roles[-1] == "user")

# -------------------------- 3. Prompts: teacher ids, student ids, and the response ids both end in

@dataclass
class Example:
    """One response. The teacher reads teacher + response, the student reads student + response."""
    where: str
    messages: list[dict]  # what the teacher reads, before the template
    teacher: list[int]
    student: list[int]
    response: list[int] | None  # None: to be sampled
    cut: bool = False  # it did not fit into the context
    held_out: bool = False
    row: int = 0  # of the targets, where those of its first token are

    @property
    def question(self) -> str:
        return next(m["content"].strip() for m in self.messages if m["role"] == "user")

class Chat:
    """Tokenizer, template and stop tokens of a model: all that turns messages into ids."""

    def __init__(self, args: Args):
        name, trust = f"--model {args.model}", {"trust_remote_code": args.trust_remote_code}
        must(not Path(args.model, "adapter_config.json").exists(),
             f"{name} is an adapter: expected a model, such as --merge writes")
        config = AutoConfig.from_pretrained(args.model, **trust)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, **trust)
        self.generation = GenerationConfig.from_model_config(config)
        with contextlib.suppress(OSError):  # the file is optional
            self.generation = GenerationConfig.from_pretrained(args.model)
        if args.chat_template:
            self.tokenizer.chat_template = read_text(args.chat_template)
        must(self.tokenizer.chat_template, f"{name} has no chat template: give --chat-template")
        size = lambda key: getattr(config.get_text_config(), key, None) or sys.maxsize
        self.window = min(size("sliding_window"), size("window_size"))
        self.limit, self.vocab = size("max_position_embeddings"), size("vocab_size")
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # past it a batch's longest row changes the others
            self.limit = rope["original_max_position_embeddings"]
        eos = [self.tokenizer.eos_token_id, *np.ravel(self.generation.eos_token_id)]
        eos = [int(i) for i in eos if i is not None and 0 <= i < self.vocab]
        must(eos, f"{name} names no stop token: expected an eos_token_id")
        self.stops, self.stop, self.kwargs = set(eos), eos[0], args.template_kwargs
        control = [token.content for token in self.tokenizer.added_tokens_decoder.values()
                   if token.special or re.fullmatch(r"<[|｜].+[|｜]>", token.content)]
        self.control = re.compile("|".join(map(re.escape, control)) or "$^")  # refused in data
        self.day = datetime.datetime.fromisoformat(args.date)  # on both sides and when resumed
        # try out what the template takes: content as text or as parts, a system message or none
        probe = [{"role": role, "content": f"Some {role} text."} for role in ("user", "assistant")]
        self.lead = ""  # white space that the template puts before an answer: the model emits it
        for self.folds, self.parts in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
            with contextlib.suppress(BadRow):
                self.render("Some system text.", probe[:1])
                start, whole = self.render(None, probe[:1]), self.render(None, probe, False)
                before, _, ending = whole.rpartition("Some assistant text.")
                self.stop = next((i for i in self.ids(ending) if i in self.stops), self.stop)
                self.lead = re.fullmatch(re.escape(start) + r"(\s*)|.*", before, re.S)[1] or ""
                break

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in ids if i not in self.stops])

    def render(self, system: str | None, turns: list[dict], generation: bool = True) -> str:
        """-> the template's text; where it takes no system message, that goes into the first user
        turn. Raises BadRow if the template refuses the messages or loses a system or user text."""
        if system and self.folds:
            turns = [turns[0] | {"content": f"{system}\n\n{turns[0]['content']}"}] + turns[1:]
        elif system:
            turns = [{"role": "system", "content": system}] + turns
        texts = [m["content"].strip() for m in turns if m["role"] != "assistant"]
        if self.parts:
            turns = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in turns]
        chat_template_utils.datetime = Args(now=lambda: self.day)  # what a template prints as today
        try:
            text = rest = self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation, **self.kwargs)
        except Exception as error:  # a template raises what it likes, and the user gets to see it
            raise BadRow(f"the chat template refuses the messages: {error}") from error
        for content in sorted(texts, key=len, reverse=True):
            need(content in rest, f"the chat template drops {brief(content)}")
            rest = rest.replace(content, "\0", 1)  # each text needs a place of its own
        return text

def encode_response(chat: Chat, tail: str, response: str) -> list[int]:
    """Text -> the ids that the model would emit after a prompt ending in `tail`, and a stop id."""
    # encoded behind the tail, for some tokenizers mark the start of a text, which this is not; but
    # behind something else if tail and response would merge over the seam
    response = response if response[:1].isspace() else chat.lead + response
    for before in (tail or ":", ":", ""):
        start, ids = chat.ids(before), chat.ids(before + response)
        if ids[:len(start)] == start:
            return ids[len(start):] + [chat.stop]

def build_example(where: str, messages: list, response, ids, chat: Chat, args: Args) -> Example:
    """One (context, response) -> token ids for both sides. `ids`, those in a row that an earlier
    run has sampled, are kept as they are if they are this response's. Raises BadRow."""
    own = messages[0]["content"] if messages[0]["role"] == "system" else None
    must(own is None or args.prompt is None, f"{where}: a system message, and --prompt: which one?")
    system, turns = own or args.prompt, messages[own is not None:]
    need(system, "found no system message and no --prompt: expected a prompt to bake")
    kept = isinstance(ids, list) and all(type(i) is int and 0 <= i < chat.vocab for i in ids)
    kept = kept and chat.text(ids) == response
    texts = [system, args.student_prompt, not kept and response, *(m["content"] for m in turns)]
    found = chat.control.search(plain_text("\n".join(filter(None, texts)), "the prompt"))
    need(not found, f"the text holds {found and found[0]!r}, a control token of this model")
    seen, text = chat.render(system, turns), chat.render(args.student_prompt, turns)
    teacher, student, last = chat.ids(seen), chat.ids(text), turns[-1]["content"].strip()
    tail = text.rpartition(last)[2]
    need(seen.rpartition(last)[2] == tail, f"expected both prompts to end in {tail!r}")
    room = chat.limit - max(len(teacher), len(student))
    need(room > 0, f"the prompt has {len(teacher)} tokens, the context {chat.limit}: no room left")
    ids = ids if kept else response and encode_response(chat, tail, response)
    need(not ids or not chat.stops & set(ids[:-1]), "the response holds a stop token of this model")
    messages = [{"role": "system", "content": system}] + turns
    return Example(where, messages, teacher, student, ids and ids[:room], len(ids or "") > room)

def build_examples(rows: list, chat: Chat, args: Args, drops: dict) -> list[Example]:
    """Rows -> examples. A bad row stops the run; with --skip-bad-rows it goes to `drops`, which has
    the places of what was left out, by reason. So do empty responses: they teach nothing."""
    examples = []
    for where, row in rows:
        try:
            turns, ids = conversations(row), row.get("ids") if isinstance(row, dict) else None
            full = [(m, response) for m, response in turns if response is None or response.strip()]
            examples += [build_example(where, *turn, ids, chat, args) for turn in full]
            drops["the response is empty"] += [where] * (len(turns) - len(full))
        except BadRow as error:
            must(args.skip_bad_rows, f"{where}: {error}")
            drops[str(error)].append(where)
    return examples

def split(examples: list[Example], apart: list[Example], args: Args, drops: dict) -> list[Example]:
    """Marks what is held out, by question, so that all responses to one are on one side: a share of
    the questions, or those of `apart` (--eval-data), which then are not trained on."""
    digest = lambda question: hashlib.sha256(f"{args.seed} {question}".encode()).digest()
    questions = sorted({e.question for e in examples}, key=digest)
    count = min(math.ceil(args.eval_fraction * len(questions)), len(questions) - 1)
    held = {e.question for e in apart} if args.eval_data else set(questions[:count])
    for e in examples + apart:
        e.held_out = e.question in held
    drops["the question is in --eval-data"] += [e.where for e in examples if apart and e.held_out]
    return [e for e in examples if not (apart and e.held_out)] + apart

# --------------------------- 4. Sampling: the prompted model answers the rows that have no response

def generate(model, chat: Chat, prompts: list, prefix: tuple, most: int, temperature) -> list:
    """B prompts -> B continuations of at most `most` ids, each cut after its first stop id. One
    call: the shared prefix, then padding, then what is left of each prompt, ending flush."""
    width = max(map(len, prompts))
    # padding in the middle would take up a sliding window: without a prefix it is all on the left
    n, cache = prefix if width + most <= chat.window else (0, None)
    ids = torch.tensor([p[:n] + [chat.stop] * (width - len(p)) + p[n:] for p in prompts])  # (B, T)
    mask = torch.tensor([[1] * n + [0] * (width - len(p)) + [1] * (len(p) - n) for p in prompts])
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
    model.generation_config = GenerationConfig(  # a checkpoint's own would fill in what is not set
        max_new_tokens=min(most, chat.limit - width), do_sample=temperature > 0,
        pad_token_id=chat.stop, eos_token_id=sorted(chat.stops), **sampling)
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                         **cached(model.get_base_model(), cache, len(ids)))[:, width:].tolist()
    ends = [next((i for i, t in enumerate(row) if t in chat.stops), len(row)) for row in out]
    return [row[:end + 1] for row, end in zip(out, ends)]

def sample_responses(model, chat: Chat, examples: list, prefix, path, args: Args, drops) -> list:
    """An example without a response -> --trajectories examples with one, sampled from the teacher.
    `path` gets them as they come; a batch has its own seed, so that an interrupted run goes on
    behind the last whole batch there as if nothing had happened."""
    asked = [e for e in examples if e.response is None for _ in range(args.trajectories)]
    if not asked:
        return examples
    asked.sort(key=lambda e: -len(e.teacher))
    size = 4 * args.batch_size
    path.touch()
    lines = path.read_bytes().split(b"\n")[:-1]  # without a torn one
    done = len(asked) if len(lines) >= len(asked) else len(lines) // size * size
    os.truncate(path, sum(len(line) + 1 for line in lines[:done]))
    with path.open("a", encoding="utf-8") as file, teacher_mode(model):
        for i in tqdm(range(done, len(asked), size), "sampling", unit="batch"):
            torch.manual_seed(args.seed + i)
            out = generate(model, chat, [e.teacher for e in asked[i:i + size]], prefix,
                           args.max_new_tokens, args.temperature)
            for e, ids in zip(asked[i:], out):
                row = {"messages": e.messages, "response": chat.text(ids), "ids": ids}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    said = [(e, json.loads(row)["ids"]) for e, row in zip(asked, path.read_bytes().split(b"\n"))]
    drops["the sampled response is empty"] += [e.where for e, ids in said if chat.stops >= {*ids}]
    return [e for e in examples if e.response is not None] + [
        replace(e, response=ids, cut=len(ids) < args.max_new_tokens and ids[-1] not in chat.stops)
        for e, ids in said if not chat.stops >= {*ids}]

# ---------------------------------------------------------------------------------------- 5. Loss

def log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)  # a KL in bf16 can come out negative
    return (logits.to(wide) / temperature).log_softmax(-1)

def token_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor,
             temperature: float = 1.0) -> torch.Tensor:
    """(n, V), (n, V) -> (n,) KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) in nats, for teacher p and
    student q over the whole vocabulary, in fp32 or better."""
    log_q, log_p = log_probs(student_logits, temperature), log_probs(teacher_logits, temperature)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

class ChunkedKL(torch.autograd.Function):
    """token_kl of head(student) and head(teacher), (M, D) each, at the (N,) indices `rows` -> (N,).

    KL_i depends on row i alone, so its gradient is formed in the forward pass, while the chunk's
    logits are there: ∂KL_i / ∂logits_i = (q_i − p_i) / temperature, and through the head to the
    hidden state. Memory is that gradient and a few (chunk, V) tensors, whatever N is."""

    @staticmethod
    def forward(ctx, student, teacher, rows, head, temperature, chunk):
        learn, kl = ctx.needs_input_grad[0], []
        ctx.grad, ctx.rows = torch.zeros_like(student) if learn else None, rows
        for part in rows.split(chunk):
            hidden = student[part].requires_grad_(learn)
            with torch.set_grad_enabled(learn):
                logits = head(hidden)  # (chunk, V)
            log_q = log_probs(logits.detach(), temperature)
            log_p = log_probs(head(teacher[part]), temperature)
            p = log_p.exp()
            kl.append(torch.linalg.vecdot(p, log_p.sub_(log_q)))
            if learn:
                slope = log_q.exp_().sub_(p).div_(temperature).to(logits.dtype)
                ctx.grad[part], = torch.autograd.grad(logits, hidden, slope)
        return torch.cat(kl)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        grad, ctx.grad = ctx.grad, None  # scaled in place, so it serves once
        slope = slope.new_zeros(len(grad)).index_copy(0, ctx.rows, slope)
        return grad.mul_(slope[:, None]), None, None, None, None, None

def batched_kl(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, head,
               temperature: float = 1.0, chunk: int | None = None) -> torch.Tensor:
    """(B, R, D) hidden states of each side, (B, R) bool mask of real response tokens -> (B,) the
    mean over a sample's tokens of KL(teacher ‖ student), in nats; 0 for a sample without tokens.

    head: (n, D) -> (n, V) logits, frozen; padded rows never reach it. chunk: rows at a time."""
    B, R, D = student.shape
    real = mask.flatten().nonzero().squeeze(1)  # (N,); a mask on the CPU spares a wait for the GPU
    real = real.to(student.device, non_blocking=True)
    kl = ChunkedKL.apply(student.reshape(B * R, D), teacher.reshape(B * R, D), real, head,
                         temperature, chunk or (512 if student.is_cuda else 128))  # (N,)
    sums = kl.new_zeros(B * R).index_copy(0, real, kl).view(B, R).sum(1)
    return sums / mask.sum(1).clamp(min=1).to(student.device, non_blocking=True)

# ----------------------------------------------------------------- 6. Model: one network, two parts

def load_model(args: Args) -> tuple:
    """-> the model with adapters, in eval mode, and its frozen head: hidden states -> logits."""
    base = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), trust_remote_code=args.trust_remote_code)
    names, what = args.target_modules.replace(" ", ""), f"--target-modules {args.target_modules}"
    torch.manual_seed(args.seed)
    try:
        model = peft.get_peft_model(base.to(args.device), peft.LoraConfig(
            r=args.rank, lora_alpha=args.alpha, bias="none", task_type="CAUSAL_LM",
            target_modules=names if names == "all-linear" else names.split(","))).eval()
    except ValueError as error:
        raise SystemExit(f"{what}: {error}") from None
    for end in (base.get_input_embeddings(), base.get_output_embeddings()):
        must(not hasattr(end, "lora_A"), f"{what}: expected neither embeddings nor head")
    for name in names.replace("all-linear", "").split(","):
        found = [n for n, _ in model.named_parameters() if f".{name}.lora_A" in f".{n}"]
        must(found or names == "all-linear", f"{what}: found no module {name!r}")
    for layer in model.modules() if args.gradient_checkpointing else ():
        if isinstance(layer, GradientCheckpointingLayer):  # in eval mode too, where dropout is off
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    head, ids = make_head(base), torch.arange(8, device=args.device)[None]
    with torch.no_grad():
        logits = base(input_ids=ids).logits
        gap = (head(hidden_states(model, ids)) - logits).abs().max() / logits.abs().max()
    must(gap < 1e-2, f"--model {args.model}: its logits are not what its head makes of its last "
         "hidden states: make_head does not know this kind of model")
    return model, head

def make_head(base):
    """-> (n, D) hidden states -> (n, V) logits, with the maps some models put behind the matrix."""
    config, linear = base.config.get_text_config(), base.get_output_embeddings()
    scale = (getattr(config, "logit_scale", 1) or 1) / getattr(config, "logits_scaling", 1)
    cap = getattr(config, "final_logit_softcapping", None)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden) if scale == 1 else linear(hidden) * scale  # Cohere, Granite
        return logits if cap is None else torch.tanh(logits / cap) * cap  # Gemma 2
    return head

@contextlib.contextmanager
def teacher_mode(model):
    """Adapters and dropout off, no gradients. The mode is restored."""
    training = model.training
    with torch.no_grad(), model.eval().disable_adapter():
        yield
    model.train(training)

def cached(module, cache, times: int) -> dict:
    """-> the argument that hands a module a one-sample KV cache, for `times` samples: a copy, as a
    call changes the cache that it is given."""
    if cache is None:
        return {}
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(times)
    name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
    return {name: cache}

def hidden_states(model, ids: torch.Tensor, cache=None) -> torch.Tensor:
    """(B, T) right-padded ids -> (B, T, D) final hidden states, on top of a prefix's KV cache if
    given. Attention is causal: what is right of a token cannot reach it, so no mask is needed."""
    trunk = model.get_base_model().base_model
    extra = cached(trunk, cache, len(ids))
    return trunk(input_ids=ids, use_cache=bool(extra), **extra).last_hidden_state

def response_states(model, examples: list[Example], side: str, prefix: tuple = (0, None)) -> tuple:
    """-> (B, R, D) hidden states that predict the response, (B, R) bool mask, on the CPU. Tokens
    [s, e) are predicted by the positions [s-1, e-1): the last token is not read."""
    n, cache = prefix
    prompts = [getattr(e, side)[n:] for e in examples]
    ids = [torch.tensor(p + e.response[:-1]) for p, e in zip(prompts, examples)]
    ids = pad_sequence(ids, batch_first=True).to(model.device, non_blocking=True)  # (B, T)
    sizes = torch.tensor([[len(e.response)] for e in examples])  # (B, 1)
    steps = torch.arange(int(sizes.max()))  # (R,)
    at = torch.tensor([[len(p) - 1] for p in prompts]) + steps.minimum(sizes - 1)  # (B, R)
    hidden = hidden_states(model, ids, cache)  # (B, T, D)
    at = at.to(model.device, non_blocking=True)[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, at), steps < sizes

def by_length(examples: list[Example], size: int, side: str) -> list[list[Example]]:
    """Groups of `size`, alike in length, so that little is padded."""
    examples = sorted(examples, key=lambda e: len(getattr(e, side)) + len(e.response))
    return [examples[i:i + size] for i in range(0, len(examples), size)]

def shared_prefix(model, examples: list[Example]) -> tuple:
    """-> (n, KV cache) of the n tokens with which all teacher prompts start, whatever they are."""
    common = os.path.commonprefix([e.teacher for e in examples])
    n = min(len(common), min(len(e.teacher) for e in examples) - 1)  # leave a token to read
    if n == 0:
        return 0, None
    trunk, ids = model.get_base_model().base_model, torch.tensor([common[:n]], device=model.device)
    try:
        with teacher_mode(model):
            out = trunk(input_ids=ids, use_cache=True)
        cache = out.cache if "cache" in out else out.past_key_values
        cached(trunk, cache, 2)
        need(cache.get_seq_length() == n, "its cache holds no tokens")
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        print(f"this model shares no prefix ({error}): the teacher reads every prompt in full")
        return 0, None
    return n, cache

# ------------------------------------------------- 7. Targets: what the teacher says, once for all

def teacher_targets(model, examples: list[Example], prefix: tuple, path: Path, args: Args):
    """-> (N, D) final hidden states of the teacher, in the file `path`, not in memory; examples are
    told their rows. A file in the making is PATH.part: rows of zeros there are yet to be done."""
    groups = by_length(examples, args.batch_size, "teacher")
    N, D = 0, model.get_output_embeddings().weight.shape[1]
    for e in (e for group in groups for e in group):
        e.row, N = N, N + len(e.response)
    dtype, part = getattr(torch, args.dtype), path.with_suffix(".part")
    size, free = N * D * dtype.itemsize, shutil.disk_usage(path.parent).free
    file = path if path.exists() else part
    must(file.exists() or size < free, f"{path}: the targets need {size:,} bytes, found {free:,}")
    targets = torch.from_file(str(file), shared=True, size=N * D, dtype=dtype).view(N, D)
    if file == part:
        done = sum(bool(targets[group[0].row].any()) for group in groups)  # the last may be torn
        with teacher_mode(model):
            for group in tqdm(groups[max(done - 1, 0):], "targets", unit="batch"):
                for e, states in zip(group, response_states(model, group, "teacher", prefix)[0]):
                    targets[e.row:e.row + len(e.response)] = states[:len(e.response)]
        os.replace(part, path)
    return targets

def both_states(model, examples: list[Example], targets: torch.Tensor) -> tuple:
    """-> the student's and the teacher's hidden states, (B, R, D) each, and the (B, R) mask."""
    student, mask = response_states(model, examples, "student")
    teacher = pad_sequence([targets[e.row:e.row + len(e.response)] for e in examples], True)
    return student, teacher.to(student.device, non_blocking=True), mask

# ------------------------------------------------------------------------------------ 8. Training

def batches(examples: list[Example], args: Args, epoch: int) -> list[list[Example]]:
    """The batches of an epoch, a pure function of (seed, epoch). Examples are shuffled, each 8
    batches' worth is sorted by length, so that little is padded, and cut; batches are shuffled."""
    rng, size, out = np.random.default_rng([args.seed, epoch]), args.batch_size, []
    order = [examples[i] for i in rng.permutation(len(examples))]
    for i in range(0, len(order), 8 * size):
        out += by_length(order[i:i + 8 * size], size, "student")
    return [out[i] for i in rng.permutation(len(out))]

@torch.no_grad()
def evaluate(model, head, examples: list[Example], targets: torch.Tensor, args: Args) -> dict:
    """-> eval_kl, nats per token, and eval_top1, the share of tokens where both sides put the same
    first: like the loss, means over samples of means over tokens."""
    kl, top1 = [], []
    for group in by_length(examples, args.micro_batch_size, "student"):
        student, teacher, mask = both_states(model, group, targets)
        kl += batched_kl(student, teacher, mask, head).tolist()
        top1 += [(head(s[m]).argmax(-1) == head(t[m]).argmax(-1)).float().mean().item()
                 for s, t, m in zip(student, teacher, mask)]
    must(np.isfinite(kl).all(), f"held-out KL is {np.mean(kl)}: try --dtype float32")
    return {"eval_kl": float(np.mean(kl)), "eval_top1": float(np.mean(top1))}

def train_step(model, head, batch: list[Example], targets: torch.Tensor, params: list, args: Args):
    """Leaves the clipped gradient of the batch's mean KL in `params` -> [that KL, the gradient's
    norm before clipping], on the device: nothing in here waits for it."""
    total = 0.0
    for i in range(0, len(batch), args.micro_batch_size):
        states = both_states(model, batch[i:i + args.micro_batch_size], targets)
        loss = batched_kl(*states, head, args.kl_temperature).sum() / len(batch)
        loss.backward()
        total += loss.detach()
    return torch.stack([total, torch.nn.utils.clip_grad_norm_(params, 1.0)])

def learning_rate(step: int, steps: int, args: Args) -> float:
    """Of step 1..steps: a linear rise, then half a cosine down to 0."""
    warmup = math.ceil(args.warmup * steps)
    fall = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup + 1))
    return args.lr * (step / warmup if step <= warmup else fall)

def train(model, head, examples: list[Example], targets, args: Args, out: Path) -> list[dict]:
    """Trains the adapters on what is not held out -> a dict a step, as in OUT/metrics.jsonl. Order
    and lr are functions of the step: a checkpoint is weights, optimizer and log, nothing else."""
    held_out, trained = ([e for e in examples if e.held_out is held] for held in (True, False))
    plan = [(epoch, batch) for epoch in range(args.epochs)
            for batch in batches(trained, args, epoch)]
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, log = torch.optim.AdamW(params.values(), weight_decay=0.0), []
    if (out / "checkpoint.pt").exists():
        weights, state, log = torch.load(out / "checkpoint.pt", weights_only=True)
        model.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(state)
    write_whole(out / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in log))
    bar = tqdm(total=len(plan), initial=max(len(log) - 1, 0), desc="training", unit="step")
    saved = len(log) - 1
    for step in range(len(log), len(plan) + 1):  # step 0 only evaluates
        entry, began = {"step": step}, time.perf_counter()
        if step:
            (epoch, batch), lr = plan[step - 1], learning_rate(step, len(plan), args)
            kl, norm = train_step(model, head, batch, targets, list(params.values()), args).tolist()
            must(math.isfinite(kl + norm), f"step {step}: KL {kl}, gradient norm {norm}, in "
                 f"{', '.join(e.where for e in batch)}; {out} holds step {saved}")
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            speed = sum(len(e.response) for e in batch) / (time.perf_counter() - began)
            entry |= dict(epoch=epoch + 1, kl=kl, lr=lr, grad_norm=norm, tokens_per_s=round(speed))
            bar.set_postfix({key: f"{value:.3g}" for key, value in entry.items() if key != "step"})
            bar.update()
        if measure := held_out and step % (len(plan) // args.epochs) == 0:
            entry |= evaluate(model, head, held_out, targets, args)
            bar.write(f"step {step}: held-out KL {entry['eval_kl']:.4f}")
        log.append(entry)
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if measure or step % args.save_every == 0 or step == len(plan):
            state = ({name: p.data for name, p in params.items()}, optimizer.state_dict(), log)
            write_whole(out / "checkpoint.pt", lambda part: torch.save(state, part))
            saved = step
    return log

# -------------------------------------------------------------------------------------- 9. Report

def samples(model, chat: Chat, examples: list[Example], args: Args) -> list[dict]:
    """Three held-out questions, answered greedily by the base, prompted and baked model."""
    held_out = [e for e in examples if e.held_out] or examples
    shown = list({e.question: e for e in held_out}.values())[:3]

    def answers(side: str) -> list[str]:
        prompts = [getattr(e, side) for e in shown]
        out = generate(model, chat, prompts, (0, None), args.max_new_tokens, 0.0)
        return [chat.text(ids) for ids in out]
    with teacher_mode(model):
        base, prompted = answers("student"), answers("teacher")
    return [{"question": e.messages[-1]["content"], "base": b, "prompted": p, "baked": k}
            for e, b, p, k in zip(shown, base, prompted, answers("student"))]

def make_report(examples: list[Example], read: int, drops: dict, log: list, args: Args) -> dict:
    """Every number that the terminal, the card and a paper show, and plain words on them."""
    report = {"rows_read": read, "rows_used": len({e.where for e in examples}),
              "rows_dropped": sum(map(len, drops.values())),
              "responses_cut": sum(e.cut for e in examples), "steps": log[-1]["step"]}
    for side in ("trained", "held_out"):
        part = [e for e in examples if e.held_out == (side == "held_out")]
        report |= {f"{side}_questions": len({e.question for e in part}), f"{side}_responses":
                   len(part), f"{side}_tokens": sum(len(e.response) for e in part)}
    notes = [f"dropped {len(at)}: {reason} (first: {at[0]})" for reason, at in drops.items() if at]
    evals = [m for m in log if "eval_kl" in m]
    if evals:
        before, *_, after = kls = [m["eval_kl"] for m in evals] * (1 if evals[1:] else 2)
        trained = np.mean([m["kl"] for m in log[1:]][-max(len(log) // 10, 1):])
        report |= {"kl_before": before, "kl_after": after, "top1_before": evals[0]["eval_top1"],
                   "top1_after": evals[-1]["eval_top1"],
                   "recovered": 1 - after / before if before >= NOISE else None}
        notes += [note for holds, note in (
            (before < NOISE, f"KL before is under {NOISE}: the prompt does nothing here to bake"),
            (after > before, "held-out KL rose, the bake failed: try a lower --lr"),
            (NOISE <= before and 0.8 * before < after <= before, "less than a fifth was recovered: "
             "try more rows, --trajectories or --epochs, or a higher --lr or --rank"),
            (min(kls[1:]) < 0.9 * after, f"an epoch had KL {min(kls[1:]):.4f}: try fewer --epochs"),
            (trained < 0.5 * after and args.kl_temperature == 1, "training KL is far below "
             f"held-out KL, at last {trained:.4f}: try more rows or fewer --epochs"),
        ) if holds]
    if report["held_out_questions"] < 5:
        notes.append("fewer than 5 questions were held out: the numbers are rough, if any")
    if len(prompts := {e.messages[0]["content"] for e in examples}) > 1:
        notes.append(f"{len(prompts)} different prompts were baked; the first of them is shown")
    return report | {"notes": notes}

def report_text(report: dict) -> str:
    rows = [(key.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else value)
            for key, value in report.items() if isinstance(value, (int, float))]
    lines = [f"{key:20}{value:>10}" for key, value in rows] + report["notes"]
    for sample in report["samples"]:
        lines += [""] + [f"{who:>8}: {text}" for who, text in sample.items()]
    return "\n".join(lines)

def curve(log: list[dict]) -> str:
    """KL by step as an SVG image: a line for training, dots for held-out questions."""
    points = [(key, m["step"], m[key]) for m in log for key in ("kl", "eval_kl") if key in m]
    wide, high = max(p[1] for p in points), max(p[2] for p in points) or 1
    spots = [(k, f"{9 + 580 * x / wide:.0f}", f"{230 - 200 * y / high:.0f}") for k, x, y in points]
    line = " ".join(f"{x},{y}" for key, x, y in spots if key == "kl")
    dots = "".join(f'<circle r="4" cx="{x}" cy="{y}"/>' for key, x, y in spots if key != "kl")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 250" font-size="12">
<rect width="600" height="250" fill="#fff"/><path d="M9 30V230H590" fill="none" stroke="#000"/>
<polyline points="{line}" fill="none" stroke="#36c"/><g fill="#c33">{dots}</g><text x="9" y="20">
KL, 0 to {high:.2f} nats a token, in {wide} steps: training (line), held-out (dots)</text></svg>"""

def model_card(report: dict, args: Args) -> str:
    quote = lambda text: "\n".join("    " + line for line in text.splitlines())  # as code, so inert
    return f"""---
base_model: {json.dumps(args.model)}
library_name: peft
tags: [lora, prompt-baking]
---
With this LoRA adapter the model answers without a system prompt as it would with this one:

{quote(report["prompt"])}

Made by bake.py, which minimises KL( P_θ(·|u,x) ‖ P_θu(·|x) ), arXiv:2409.13697, with the settings
in args.json. Load it with `peft.AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")`.

{quote(report_text(report))}

![KL by step](kl.svg)
"""

# ---------------------------------------------------------------------- 10. Files: whole, or absent

def write_whole(path: Path, content) -> None:
    """Writes text, or what the function `content` writes, beside `path`, and then renames it."""
    part = path.with_name(path.name + ".part")
    try:
        content(part) if callable(content) else part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # a full disk; torch.save calls it a RuntimeError
        raise SystemExit(f"{path}: {error}; what was whole in {path.parent} still is") from None

def claim(out: Path, args: Args) -> tuple:
    """Makes sure that OUT is this run's, and nobody else's now -> (lock, text for args.json)."""
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / ".lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"--out {out}: another run is at work there") from None
    old = json.loads(read_text(out / "args.json")) if (out / "args.json").exists() else {}
    must(old or not set(os.listdir(out)) - {".lock", "args.json.part"},
         f"--out {out} holds files of something else: expected a new folder, or an earlier run's")
    args.date = old.get("date", args.date)
    new = dict(vars(args)) | {f"sha256 of {name}": sha256(getattr(args, name) or "")
                              for name in ("data", "eval_data", "chat_template", "prompt", "model")}
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, np)}
    versions["bake.py"] = sha256(__file__)
    names = sorted((old.keys() | new.keys()) - {"versions", "out"}) if old else []
    other = [f"{name}: {old.get(name)!r:.200} there, {new.get(name)!r:.200} here"
             for name in names if old.get(name) != new.get(name)]
    must(not other, f"--out {out} is another run's: " + "; ".join(other))
    if old.get("versions", versions) != versions:
        print(f"this run began with other versions: {old['versions']}, now {versions}")
    return lock, json.dumps(new | {"versions": versions}, indent=2)

def sha256(what: str) -> str:
    """Of a file, of the starts of the files in a folder, or of a text that is neither."""
    if os.path.isdir(what):
        files = [file for file in sorted(Path(what).iterdir()) if file.is_file()]
        data = b"".join(file.open("rb").read(2 ** 20) for file in files)
    else:
        data = Path(what).read_bytes() if os.path.isfile(what) else what.encode(errors="replace")
    return hashlib.sha256(data).hexdigest()

# ---------------------------------------------------------------------------------------- 11. main

def bake(args: Args, out: Path, identity: str) -> dict:
    """A whole run, or what is left of one -> its report."""
    drops, chat, rows = defaultdict(list), Chat(args), read_rows(args.data)
    apart = read_rows(args.eval_data) if args.eval_data else []
    examples = split(build_examples(rows, chat, args, drops),
                     build_examples(apart, chat, args, drops), args, drops)
    check_sides(examples, args, drops)
    write_whole(out / "args.json", identity)
    for side in ("teacher", "student"):
        print(f"--- the {side} reads, in {examples[0].where}:")
        print(chat.tokenizer.decode(getattr(examples[0], side)))
    if chat.folds:
        print("--- the template takes no system message: the prompt is put into the user's turn")
    model, head = load_model(args)
    prefix = shared_prefix(model, examples)
    examples = sample_responses(
        model, chat, examples, prefix, out / "trajectories.jsonl", args, drops)
    check_sides(examples, args, drops)
    targets = teacher_targets(model, examples, prefix, out / "targets", args)
    log = train(model, head, examples, targets, args, out)
    report = make_report(examples, len(rows) + len(apart), drops, log, args)
    report["prompt"] = examples[0].messages[0]["content"]
    report["samples"] = samples(model, chat, examples, args)
    model.save_pretrained(out)
    chat.tokenizer.save_pretrained(out)
    (out / "kl.svg").write_text(curve(log))
    (out / "README.md").write_text(model_card(report, args), encoding="utf-8")
    if args.merge:
        model = model.merge_and_unload()
        model.generation_config = chat.generation
        model.save_pretrained(out / "merged")
        chat.tokenizer.save_pretrained(out / "merged")
    write_whole(out / "report.json", json.dumps(report, indent=2))  # from here on it is done
    return report

def check_sides(examples: list[Example], args: Args, drops: dict) -> None:
    left = {e.held_out for e in examples}
    counts = {reason: len(places) for reason, places in drops.items() if places}
    must(left >= ({False, True} if args.eval_data else {False}),
         f"no row is left to train on, or of --eval-data; dropped: {counts}")

def main(argv: list[str] | None = None) -> dict:
    """Runs, goes on with, or shows what the command line asks for -> its report."""
    args = parse_args(argv)
    out = Path(args.out)
    lock, identity = claim(out, args)  # held until the end
    if (out / "report.json").exists():
        print(f"{out} is done")
        report = json.loads(read_text(out / "report.json"))
    else:
        report = bake(args, out, identity)
    for name in ("targets", "checkpoint.pt"):
        (out / name).unlink(missing_ok=True)
    print(report_text(report))
    return report

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; what is done is kept in --out: the same command goes on from there")
    except torch.OutOfMemoryError as error:
        sys.exit(f"{error}\nto use less: --micro-batch-size 1, --gradient-checkpointing")
    except OSError as error:
        sys.exit(f"{error}; what is whole in --out stays so")
