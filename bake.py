#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Bake a system prompt into the weights of a language model (prompt baking, arXiv:2409.13697).

For a model θ and a system prompt u, train LoRA weights θ_u with which the model without the prompt
predicts what it would predict with it, over the tokens of responses y:

    P_θu(y | x) ≈ P_θ(y | u, x)    by minimising    KL( P_θ(·|u,x) ‖ P_θu(·|x) )

One network is both teacher (adapters off, sees u) and student (adapters on, does not). The KL is
exact, over the whole vocabulary. However long u is, a step costs about what fine-tuning costs:
  1. the teacher is frozen: its final hidden states are computed once and kept in a file;
  2. prompts start alike: the tokens that they have in common at the start are read once;
  3. only positions that predict the response meet the head, in chunks that form their gradient.

    $ python bake.py --model Qwen/Qwen3-0.6B --data examples/pirate.jsonl
    $ python bake.py --model DIR --data examples/questions.txt --prompt "You are ..."

Part 1 is the method: paste it into your own code. Part 2 is the program around it.
Left out: top-k approximations of the KL, sampling inside the training step, full fine-tuning.
Shapes: B samples, T tokens, R response tokens, D hidden size, V vocabulary, N tokens to predict.
"""
# Part 1 needs these alone.
import contextlib
import copy
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

# Part 2 needs these besides.
import argparse
import collections
import hashlib
import io
import json
import re
import sys

import filelock
import huggingface_hub
import peft
import transformers
from tqdm import tqdm

# ===== Part 1: the method ========================================================================
# Paste it with its imports: it runs alone, on causal models of transformers with LoRA by PEFT.

@dataclass(eq=False)
class Example:
    """One response, with its stop token. Each side reads its own prompt, and then the response."""
    teacher_prompt: list[int]
    student_prompt: list[int]
    response: list[int]
    target: torch.Tensor | None = None  # (R, D) teacher states that predict the response

# -------------------------------------------------------------------------------------- the loss
def log_probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax in fp32 or better: in bf16 a KL over a large vocabulary can come out negative."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(-1)

def token_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor,
             temperature: float = 1.0) -> torch.Tensor:
    """(n, V), (n, V) -> (n,): KL(p ‖ q) = Σ_v p_v (log p_v − log q_v), in nats.
    The definition: p is the teacher, q the student, the temperature divides the logits of both."""
    log_q = log_probs(student_logits, temperature)
    log_p = log_probs(teacher_logits, temperature)
    return (log_p.exp() * (log_p - log_q)).sum(-1)

class ChunkedKL(torch.autograd.Function):
    """token_kl of head(student) and head(teacher), (B * R, D) each, at the (N,) `rows` -> (B * R,).

    KL_i depends on row i alone, so its gradient is formed in the forward pass, while the logits of
    a chunk are there: ∂KL_i / ∂logits_i = (q_i − p_i) / temperature, and back through the head.
    Memory is that gradient and a few (chunk, V) tensors, however large N is."""

    @staticmethod
    def forward(ctx, student, teacher, rows, head, temperature, chunk):
        wide = torch.promote_types(student.dtype, torch.float32)
        kl = torch.zeros(len(student), dtype=wide, device=student.device)
        ctx.grad = torch.zeros_like(student)
        for part in rows.split(chunk):
            hidden = student[part].detach().requires_grad_()
            with torch.enable_grad():  # the teacher's logits need one only if the head does
                logits = head(hidden)  # (chunk, V)
                teacher_logits = head(teacher[part].detach())
            if teacher_logits.requires_grad:
                raise ValueError("batched_kl gives a head no gradient: freeze its parameters")
            log_q = log_probs(logits.detach(), temperature)
            log_p = log_probs(teacher_logits, temperature)
            p = log_p.exp()
            # Another loss is another line here, in grad_logits and in token_kl.
            kl[part] = (p * (log_p - log_q)).sum(-1)
            if ctx.needs_input_grad[0]:
                grad_logits = (log_q.exp() - p).to(logits.dtype) / temperature
                ctx.grad[part] = torch.autograd.grad(logits, hidden, grad_logits)[0]
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_kl):
        if ctx.grad is None:
            raise RuntimeError("a second backward through batched_kl: its gradient serves once")
        grad = ctx.grad.mul_(grad_kl[:, None])
        ctx.grad = None
        return grad, None, None, None, None, None

def batched_kl(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor, head,
               temperature: float = 1.0, chunk: int | None = None) -> torch.Tensor:
    """(B, R, D) states of each side, (B, R) bool mask -> (B,) mean KL over each sample's tokens.

    The states are those after the model's final norm, at the positions that predict the response.
    head: (n, D) -> (n, V) logits, frozen, with every scale and cap that the model puts around its
    matrix; padding never reaches it. The teacher gets no gradient. chunk: rows at a time.
    Raises ValueError at other shapes or masks, and if the head's parameters require a gradient."""
    fits = student.shape == teacher.shape and mask.shape == student.shape[:2]
    if not fits or mask.dtype != torch.bool:
        raise ValueError("expected (B, R, D) states twice and a (B, R) bool mask, found "
                         f"{student.shape}, {teacher.shape} and {mask.dtype} {mask.shape}")
    if chunk is None:
        chunk = 512 if student.is_cuda else 128
    rows = mask.flatten().nonzero().squeeze(1).to(student.device, non_blocking=True)  # (N,)
    counts = mask.sum(1).clamp(min=1).to(student.device, non_blocking=True)
    kl = ChunkedKL.apply(student.flatten(0, 1), teacher.flatten(0, 1), rows, head, temperature,
                         chunk)  # (B * R,)
    return kl.view(mask.shape).sum(1) / counts

# ------------------------------------------------------------- the network: one model, two parts
@contextlib.contextmanager
def teacher_mode(model):
    """Adapters off, dropout off, no gradients; all of it is restored afterwards."""
    training = model.training
    try:
        with torch.no_grad(), model.eval().disable_adapter():
            yield
    finally:
        model.train(training)

def run_trunk(model, ids: torch.Tensor, use_cache: bool = False, **more):
    """(B, T) ids -> the output of the model without its head: last_hidden_state (B, T, D)."""
    decoder = model.get_decoder()
    decoder = getattr(decoder, "model", decoder)  # Llama 4 gives the whole model
    return decoder(input_ids=ids, use_cache=use_cache, return_dict=True, **more)

def logits_of(matrix, factor: float, cap: float | None, states: torch.Tensor) -> torch.Tensor:
    """Final hidden states (n, D) -> logits (n, V)."""
    logits = matrix((states * factor).to(matrix.weight.dtype))  # Mamba keeps its states in fp32
    return torch.tanh(logits / cap) * cap if cap else logits

def make_head(model):
    """-> the map from final hidden states (n, D) to logits (n, V), found by trying on a few tokens.

    Raises ValueError if no known map gives the model's own logits, or if it is no causal model."""
    config = model.config.get_text_config()
    # Cohere and HyperCLOVA X multiply by a scale, Granite divides; Gemma 2, RecurrentGemma cap.
    scale = getattr(config, "logit_scale", None) or getattr(config, "logits_scaling", None) or 1
    cap = getattr(config, "final_logit_softcapping", getattr(config, "logits_soft_cap", None))
    ids = torch.arange(8, device=model.device)[None]  # (1, T)
    with torch.no_grad():
        states = run_trunk(model, ids).last_hidden_state
        if not states.isfinite().all():
            raise ValueError(f"its states are not finite in {states.dtype}")
        start = run_trunk(model, ids[:, :4]).last_hidden_state
        if not agree(start, states[:, :4], 1e-4):
            raise ValueError("it is not causal: a token's state depends on what follows it")
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        for factor in (scale, 1 / scale):  # the name does not say which
            head = functools.partial(logits_of, model.get_output_embeddings(), factor, cap)
            if agree(head(states), logits, 1e-4):
                return head
    raise ValueError("its logits are no known function of its final hidden states: see make_head")

def agree(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether they differ by rounding alone: by a share of the spread of what is expected, that is
    `tolerance` in single precision or better, and 2 % in half precision."""
    half = expected.dtype in (torch.bfloat16, torch.float16)
    spread = expected.max() - expected.min()
    return bool((found - expected).abs().max() <= (2e-2 if half else tolerance) * spread)

@dataclass
class Prefix:
    """The KV cache of the tokens that prompts start with. Length 0: nothing is shared."""
    length: int = 0
    cache: object = None
    argument: str = "past_key_values"  # what this kind of model calls it

    def for_batch(self, size: int) -> dict:
        """The argument for a call with `size` rows. A copy: a call changes the cache it gets."""
        if self.length == 0:
            return {}
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in cache.layers:
            for name, state in vars(layer).items():
                setattr(layer, name, repeated(state, size))
        return {self.argument: cache, "use_cache": True}

def repeated(state, size: int, copied: bool = False):
    """What a cache layer holds, for `size` rows: a view, or a copy where a call overwrites it."""
    if isinstance(state, dict):  # convolution and recurrent states
        return {key: repeated(value, size, copied=True) for key, value in state.items()}
    if not torch.is_tensor(state) or state.dim() < 2 or len(state) > 1:
        return state
    return state.repeat_interleave(size, 0) if copied else state.expand(size, *state.shape[1:])

def shared_prefix(model, prompts: list[list[int]]) -> Prefix:
    """Reads once what all prompts start with, but for the last token of each. A model with
    windows or recurrent layers may not go on from its cache exactly: where config.use_cache is
    False, nothing is shared."""
    common = os.path.commonprefix([prompt[:-1] for prompt in prompts])
    if not common or not getattr(model.config.get_text_config(), "use_cache", True):
        return Prefix()
    output = run_trunk(model, torch.tensor([common], device=model.device), use_cache=True)
    for argument in output:
        if "past" in argument or "cache" in argument:
            return Prefix(len(common), output[argument], argument)
    raise ValueError("this model returns no KV cache: set its config.use_cache = False")

def response_states(model, prompts: list, responses: list, prefix: Prefix) -> list[torch.Tensor]:
    """-> for each pair the (R, D) final hidden states that predict the response.

    A response at [s, e) is predicted at [s-1, e-1), so its last token is never read. The padding is
    on the right, where a causal model needs no mask."""
    prompts = [prompt[prefix.length:] for prompt in prompts]
    if not all(prompts) or not all(responses):
        raise ValueError("expected at least one token in each prompt and response")
    ids = [torch.tensor(prompt + response[:-1]) for prompt, response in zip(prompts, responses)]
    ids = pad_sequence(ids, batch_first=True).to(model.device, non_blocking=True)  # (B, T)
    output = run_trunk(model, ids, **prefix.for_batch(len(ids)))
    states = []
    for hidden, prompt, response in zip(output.last_hidden_state, prompts, responses):
        states.append(hidden[len(prompt) - 1:][:len(response)])
    return states

# ---------------------------------------------- the targets: what the teacher says, once for all
def sorted_by_length(examples: list, side: str) -> list:
    """By the length of prompt and response. side: "teacher_prompt" or "student_prompt"."""
    return sorted(examples, key=lambda e: len(getattr(e, side)) + len(e.response))

def by_length(examples: list, size: int, side: str = "student_prompt") -> list[list]:
    """Batches of examples of similar length, so that little is padded."""
    ordered = sorted_by_length(examples, side)
    return [ordered[i:i + size] for i in range(0, len(ordered), size)]

def teacher_targets(model, examples: list[Example], prefix: Prefix, path: Path, batch_size: int,
                    progress=iter):
    """Runs the teacher over all examples, once, and sets every example.target.

    prefix: what the teacher prompts share, read in teacher_mode. The states go into one (N, D) file
    at `path`, D numbers a token instead of V, renamed when it is whole. progress: tqdm, for one."""
    part = path.with_name(path.name + ".part")
    with teacher_mode(model), open(part, "wb") as file:
        for batch in progress(by_length(examples, batch_size, "teacher_prompt")):
            prompts = [e.teacher_prompt for e in batch]
            states = response_states(model, prompts, [e.response for e in batch], prefix)
            file.write(torch.cat(states).to(model.dtype).cpu().view(torch.uint8).numpy())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    read_targets(model, examples, path)

def read_targets(model, examples: list[Example], path: Path):
    """Sets every example.target: a view of its rows of the (N, D) file of teacher_targets."""
    tokens = sum(len(e.response) for e in examples)
    width = model.get_output_embeddings().weight.shape[1]
    targets = torch.from_file(str(path), size=tokens * width, dtype=model.dtype).view(-1, width)
    if path.stat().st_size != targets.nbytes:
        raise ValueError("these are the targets of other examples")
    start = 0
    for example in sorted_by_length(examples, "teacher_prompt"):  # as they were written
        example.target = targets[start:start + len(example.response)]
        start += len(example.response)

# ---------------------------------------------------------------------------------------- a step
def batches(examples: list, size: int, seed: int, epoch: int) -> list[list]:
    """The batches of an epoch, of similar lengths, shuffled: a pure function of seed and epoch."""
    rng = np.random.default_rng([seed, epoch])
    order = [examples[i] for i in rng.permutation(len(examples))]
    made = []
    for start in range(0, len(order), 8 * size):
        made += by_length(order[start:start + 8 * size], size)
    return [made[i] for i in rng.permutation(len(made))]

def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """At step 1, 2, ... steps: a linear rise over a share `warmup`, then half a cosine to 0."""
    rise = math.ceil(warmup * steps)
    if step <= rise:
        return peak * step / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise + 1)))

# Tokens saved from which a shared student prefix pays: measured on 2 CPU cores, guessed for a GPU.
PAYS = {"cpu": 96, "cuda": 4096}
def student_prefix(model, prompts: list[list[int]]) -> Prefix:
    """What the student prompts of a batch start with, read once, with gradient, where that pays."""
    saved = len(os.path.commonprefix(prompts)) * (len(prompts) - 1)
    pays = saved >= PAYS.get(model.device.type, PAYS["cuda"])
    return shared_prefix(model, prompts) if pays else Prefix()

def batch_states(model, examples: list[Example]) -> tuple:
    """-> student and teacher states, (B, R, D) each, and the (B, R) mask of real tokens."""
    prompts = [e.student_prompt for e in examples]
    responses = [e.response for e in examples]
    student = response_states(model, prompts, responses, student_prefix(model, prompts))
    student = pad_sequence(student, batch_first=True)
    teacher = pad_sequence([e.target for e in examples], batch_first=True)
    mask = pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in responses], batch_first=True)
    return student, teacher.to(student.device, non_blocking=True), mask

def batch_kl(model, head, examples: list[Example], temperature: float = 1.0) -> torch.Tensor:
    """-> (B,) mean KL over each example's tokens, in nats, with gradient."""
    return batched_kl(*batch_states(model, examples), head, temperature)

def train_step(model, head, batch: list[Example], params: list, micro_batch_size: int,
               temperature: float = 1.0) -> torch.Tensor:
    """Adds the mean KL's gradient to params' .grad, clips the sum to 1 -> (2,): KL, norm before."""
    total = 0.0
    for part in by_length(batch, micro_batch_size):
        loss = batch_kl(model, head, part, temperature).sum() / len(batch)
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    return torch.stack([total, norm])

def top1(student: torch.Tensor, teacher: torch.Tensor, head, chunk: int = 128) -> float:
    """(R, D) states of each side -> the share of tokens that both sides rank first."""
    same = 0
    for s, t in zip(student.split(chunk), teacher.split(chunk)):
        same += (head(s).argmax(-1) == head(t).argmax(-1)).sum().item()
    return same / len(student)

@torch.no_grad()
def evaluate(model, head, examples: list[Example], micro_batch_size: int) -> list[tuple]:
    """-> (KL in nats per token, top-1 agreement) of each example, in order, at temperature 1."""
    scores = {}
    for batch in by_length(examples, micro_batch_size):
        states = batch_states(model, batch)
        kl = batched_kl(*states, head).tolist()
        for example, value, student, teacher, real in zip(batch, kl, *states):
            scores[example] = value, top1(student[real], teacher[real], head)
    return [scores[example] for example in examples]

# ===== Part 2: the program =======================================================================
# data -> rows -> examples -> sampled responses -> teacher targets -> training -> report

def bake(args, out: Path):
    """From rows to a report. Each phase resumes from what OUT holds of it."""
    model, head = load_model(args)
    chat = load_chat(model, args)
    examples = prepare(out, chat, args)
    first = examples[0]
    show(f"the teacher reads, in {first.where}:", chat.tokenizer.decode(first.teacher_prompt))
    show("the student reads:", chat.tokenizer.decode(first.student_prompt))

    prefix = exact_prefix(model, [e.teacher_prompt for e in examples])
    examples = sample_responses(model, chat, examples, prefix, out, args)
    first = examples[0]
    show(f"both predict, in {first.where}:", chat.tokenizer.decode(first.response))

    make_targets(model, examples, prefix, out / "targets", args)
    del prefix  # the teacher is done: its cache may take gigabytes
    trained = [e for e in examples if not e.held_out]
    held_out = [e for e in examples if e.held_out]
    print(f"--- {len(trained)} responses to train on, {len(held_out)} held out")
    log = train(model, head, trained, held_out, args, out)
    report = make_report(trained, held_out, log)
    report["samples"] = side_by_side(model, chat, held_out or trained, args)
    write_results(model, chat, report, out)

class Refused(SystemExit):
    """What the user gave cannot be used: this ends the run with one line. It is no Exception, so
    `expect` lets it pass."""

@contextlib.contextmanager
def expect(what: str):
    """Whatever a library raises inside becomes one line: what was expected, and what it said."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise Refused(f"expected {what}, found {type(error).__name__}: {said}")

# ---------------------------------------------------------- rows: every known shape, made into one
ROW_NAMES = {"conversations": "messages", "question": "prompt", "instruction": "prompt",
             "query": "prompt", "user_message": "prompt", "response": "completion",
             "answer": "completion", "output": "completion", "system_prompt": "system",
             "context": "input"}
MESSAGE_NAMES = {"from": "role", "value": "content"}
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "assistant": "assistant", "gpt": "assistant", "model": "assistant"}

def unique(pairs: list) -> dict:
    """A JSON object. Of a key that stands twice, one value would be lost in silence."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"a key twice among {', '.join(key for key, _ in pairs)}")
    return dict(pairs)

def parse_json(text: str, what: str):
    with expect(f"{what} in JSON"):
        return json.loads(text, object_pairs_hook=unique)

def read_rows(path: str) -> list:
    """A .jsonl file, or a .txt file with a question a line -> [(file:line, JSON of a row)]."""
    with expect(f"--data {path} to be .jsonl or .txt, in UTF-8"):
        text = Path(path).read_text(encoding="utf-8-sig")
        if not path.endswith((".jsonl", ".txt")):
            raise ValueError("another kind of file: README has a line that makes rows of it")

    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            row = json.dumps({"prompt": line}) if path.endswith(".txt") else line
            rows.append((f"{path}:{number}", row))
    if not rows:
        raise Refused(f"expected rows in --data {path}, found none")
    return rows

def rename(record, names: dict, known: list, ignored: list) -> dict:
    """The record under standard names. What is null or empty counts as absent.

    Raises Refused at a key that is not read, and at two keys that become one."""
    if not isinstance(record, dict):
        raise Refused(f"expected an object with {', '.join(known)}, found {record!r:.200}")
    renamed = {}
    unread = []
    for key, value in record.items():
        name = names.get(key, key)
        if key in ignored or value in (None, "", [], {}):
            continue
        if name in renamed:
            raise Refused(f"expected one {name}, found two among {', '.join(record)}: to leave one "
                          "out, --ignore it")
        if name not in known:
            unread.append(key)
        renamed[name] = value

    if unread:
        keys = ",".join(unread)
        raise Refused(f"expected the keys {', '.join(known)}, found {keys}: to leave out what "
                      f"is not read, --ignore {keys}")
    return renamed

def read_text(content, role: str, ignored: list) -> str:
    """A text, or a list of parts that are all text."""
    if isinstance(content, list):
        parts = [rename(part, {}, ["type", "text"], ignored) for part in content]
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            content = "".join(texts)

    if not isinstance(content, str):
        raise Refused(f"expected text as the {role} message, found {content!r:.200}")
    return content

def read_messages(value, role: str, ignored: list) -> list:
    """A list of messages, or a text that `role` says -> messages under standard names."""
    if not isinstance(value, list):
        value = [{"role": role, "content": value}]
    messages = []
    for message in value:
        message = rename(message, MESSAGE_NAMES, ["role", "content", "weight"], ignored)
        speaker = message.get("role")
        if speaker not in list(ROLES):
            raise Refused(f"expected a role of {', '.join(ROLES)}, found {speaker!r:.200}")
        if message.get("weight", 1) not in (0, 1, "0", "1"):
            raise Refused(f"expected a weight of 0 or 1, found {message['weight']!r:.200}")
        content = read_text(message.get("content", ""), speaker, ignored)
        messages.append(message | {"role": ROLES[speaker], "content": content})
    return messages

def check_turns(messages: list):
    """A system message or none, then a user and an assistant by turns."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    for i, role in enumerate(turns):
        if role != ("user", "assistant")[i % 2]:
            raise Refused("expected a system message or none, then a user's and an assistant's by "
                          f"turns, found {', '.join(roles)}")

def conversations(row, ignored: list) -> list:
    """A row -> [(messages, response, ids)]: one for each response to train on, with all that came
    before it, and one with None where the row ends in a user's turn: that is to be sampled."""
    known = ["system", "messages", "prompt", "completion", "ids"]
    if isinstance(row, dict) and row.get("instruction") and "instruction" not in ignored:
        known.append("input")  # as Alpaca and Dolly have it
    row = rename(row, ROW_NAMES, known, ignored)

    if ("messages" in row) == ("prompt" in row):
        raise Refused(f"expected either messages or a prompt, found {', '.join(row) or 'neither'}")

    if "input" in row and "prompt" in row:
        texts = [read_text(row[key], "user", ignored) for key in ("prompt", "input")]
        row["prompt"] = "\n\n".join(texts)
    if "ids" in row:
        row.setdefault("completion", "")  # the model said nothing but its stop token

    messages = []
    if "system" in row:
        text = read_text(row["system"], "system", ignored)
        messages = [{"role": "system", "content": text}]
    messages += read_messages(row.get("messages", row.get("prompt")), "user", ignored)
    # Beside a completion, and in a prompt, an assistant's turn is but context.
    context = len(messages) if "prompt" in row or "completion" in row else 0
    messages += read_messages(row.get("completion", []), "assistant", ignored)
    check_turns(messages)

    found = []
    for i, message in enumerate(messages):
        trained = message.get("weight", 1) in (1, "1")
        if i >= context and message["role"] == "assistant" and trained:
            found.append((messages[:i], message["content"], row.get("ids")))
    if messages and messages[-1]["role"] == "user":
        found.append((messages, None, row.get("ids")))
    if not found:
        raise Refused("expected a response to train on, or a user's turn at the end, found "
                      f"{', '.join(message['role'] for message in messages)}")
    return found

# -------------------------------- prompts: teacher ids, student ids, and the response both end in
@dataclass(eq=False, kw_only=True)
class RowExample(Example):
    """An Example, and where it comes from. Until it is sampled, its response is None."""
    where: str  # file:line
    messages: list  # what the teacher reads, before the template
    question: str  # the first of the user's turns
    held_out: bool = False

def single_spaced(text: str) -> str:
    """With white space as single spaces, as some templates show it."""
    return " ".join(text.split())

ANY_TURN = {"role": "user", "content": "Some user text."}
class Chat:
    """Tokenizer, chat template, stop tokens and limits of a model: what turns messages into ids."""

    def __init__(self, tokenizer, model, template_kwargs: dict):
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.vocab = model.get_input_embeddings().num_embeddings
        config = model.config.get_text_config()
        self.limit = sys.maxsize
        for name in ("max_position_embeddings", "max_seq_len"):
            self.limit = min(self.limit, getattr(config, name, None) or sys.maxsize)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            # Past its first context, each row's states depend on the longest row of its batch.
            self.limit = min(self.limit, rope["original_max_position_embeddings"])

        ends = np.hstack([tokenizer.eos_token_id, model.generation_config.eos_token_id])
        self.stops = [int(token) for token in ends if token is not None]
        if not self.stops or max(self.stops) >= self.vocab:
            raise Refused(f"expected stop tokens below {self.vocab}, of the tokenizer or the "
                          f"generation config, found {self.stops}")
        tokens = tokenizer.added_tokens_decoder.values()
        marks = ("<|", "<｜")
        self.control = [t.content for t in tokens if t.special or t.content.startswith(marks)]

        self.fold_system = False
        probe = [{"role": "system", "content": "Some system text."}, ANY_TURN]
        try:
            self.render(probe)
        except Refused:
            # Without a place for a system message, it goes into the user's first turn.
            self.fold_system = True
            self.render(probe)

    def encode(self, text: str) -> list[int]:
        with expect("text that the tokenizer takes"):
            return self.tokenizer(text, add_special_tokens=False).input_ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([token for token in ids if token not in self.stops])

    def render(self, messages: list, answer: bool = True) -> str:
        """-> the template's text. Refused if it does not take the messages, or loses a text."""
        if self.fold_system and messages[0]["role"] == "system":
            merged = messages[0]["content"] + "\n\n" + messages[1]["content"]
            messages = [{"role": "user", "content": merged}, *messages[2:]]
        with expect("messages (and --template-kwargs) that the chat template takes"):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer, **self.template_kwargs)

        shown = single_spaced(text)
        for message in messages:
            content = single_spaced(message["content"])
            if message["role"] != "assistant" and (not content or content not in shown):
                raise Refused(f"expected text that the template shows, found {message!r:.200}")
            if any(token in content for token in self.control):
                raise Refused(f"expected text without control tokens, found {message!r:.200}")
        return text

def load_chat(model, args) -> Chat:
    """The Chat of the model's own tokenizer."""
    with expect(f"a tokenizer in --model {args.model}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            args.model, trust_remote_code=args.trust_remote_code)
    return Chat(tokenizer, model, args.template_kwargs)

# A block of thoughts, open or empty: <think>, <think></think>, <seed:think>, Gemma's channel.
THOUGHTS = r"(<[\w:]*(?:think|thought|reason)\w*>|<\|channel>thought)\s*(</[\w:]+>|<channel\|>)?\s*"
def response_text(chat: Chat, messages: list, prompt: str, response: str) -> str:
    """A given response -> the text that the model would say after `prompt`, as the template has it.

    What stands between the two is part of it: a space, a channel, the end of a think block that
    the prompt opens. A whole, empty block is not: the template adds it, the model does not."""
    whole = chat.render([*messages, {"role": "assistant", "content": response}], answer=False)
    block = re.search(THOUGHTS + "$", prompt)
    without_block = prompt[:block.start()] if block else prompt
    start = prompt
    if block and not whole.startswith(prompt):
        start = without_block  # some templates leave it out of turns that are past

    text = whole.removeprefix(start)
    shown = re.match(r"\s*" + THOUGHTS, text)
    if shown and shown[2]:
        text = text[shown.end():]
    said = prompt.removeprefix(without_block) + text  # responses may bring the block that is open
    fits = whole.startswith(start) and single_spaced(response) in single_spaced(said)
    if block:
        closing = block[1].replace("<", "</")
        closings = 0 if block[2] else 1  # the text closes what the prompt leaves open
        fits = fits and text.count(closing) == closings and not text.lstrip().startswith(block[1])
    if not fits or not response.strip():
        raise Refused("expected a response with text, and a template that shows it as the model "
                      "says it, behind the prompt: have it sampled, or turn thinking off with "
                      "--template-kwargs")
    return text

def encode_response(chat: Chat, messages: list, prompt: str, response: str) -> list[int]:
    """A given response -> the ids that the model would emit after `prompt`, up to a stop token."""
    text = response_text(chat, messages, prompt, response)
    if set(chat.encode(response)) & set(chat.stops):
        raise Refused(f"expected a response without a stop token in it, found {response!r:.200}")

    # Some tokenizers mark the start of a text, and here is none: something stands before it. But
    # no token may reach over the seam.
    for before in (prompt[-20:], ":", ""):
        start = chat.encode(before)
        ids = chat.encode(before + text)
        if ids[:len(start)] == start:
            break
    return cut_after_stop(ids[len(start):] + [chat.stops[0]], chat.stops)

def check_ids(ids, response: str | None, chat: Chat):
    """Ids that a row brings are what a model said: they may hold control tokens, as no text may."""
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i < chat.vocab for i in ids)
    if not known or chat.decode(ids) != response or cut_after_stop(ids, chat.stops) != ids:
        raise Refused("expected ids that are the completion's, with this model's tokenizer, found "
                      "others: to encode the text anew, --ignore ids")

@functools.cache  # rows share their prompt
def prompt_end(chat: Chat, system: str) -> str:
    """What the template puts behind a user's turn under this system message, or under none."""
    start = [{"role": "system", "content": system}] if system else []
    return chat.render([*start, ANY_TURN]).rpartition(ANY_TURN["content"])[2]

def build_example(where: str, messages: list, response, ids, chat: Chat, args) -> RowExample:
    """One (messages, response), with its ids if the row has them -> the ids of both sides."""
    own_prompt = messages[0]["role"] == "system"
    if own_prompt == bool(args.prompt):
        raise Refused("expected one prompt to bake, --prompt or the row's own system message, "
                      f"found {'both' if own_prompt else 'neither'}")
    if args.prompt:
        messages = [{"role": "system", "content": args.prompt}, *messages]

    student_messages = messages[1:]
    if args.student_prompt:
        student_messages = [{"role": "system", "content": args.student_prompt}, *student_messages]

    teacher_text = chat.render(messages)
    teacher_prompt = chat.encode(teacher_text)
    student_prompt = chat.encode(chat.render(student_messages))
    # Some system prompts make a template turn thinking off, and would for the teacher alone.
    ends = prompt_end(chat, messages[0]["content"]), prompt_end(chat, args.student_prompt)
    if ends[0] != ends[1]:
        raise Refused(f"expected both prompts to end alike, found {ends[0]!r} and {ends[1]!r}: set "
                      "with --template-kwargs what the prompt sets")

    if ids is not None:
        check_ids(ids, response, chat)
    elif response is not None:
        ids = encode_response(chat, messages, teacher_text, response)

    length = max(len(teacher_prompt), len(student_prompt)) + len(ids or [0])
    if length > chat.limit:
        raise Refused(f"expected at most {chat.limit} tokens, the context, found {length}")
    largest = max(teacher_prompt + student_prompt + (ids or []))
    if largest >= chat.vocab:
        raise Refused(f"expected token ids below {chat.vocab}, the vocabulary, found {largest}")
    return RowExample(teacher_prompt, student_prompt, ids, where=where, messages=messages,
                      question=messages[1]["content"].strip())

def build_examples(rows: list, chat: Chat, args) -> list[RowExample]:
    """Rows -> examples. Refused at the bad rows, or, with --skip-bad-rows, where none is left."""
    examples = []
    bad = []
    for where, row in rows:
        try:
            found = conversations(parse_json(row, "a row"), args.ignore)
            examples += [build_example(where, *one, chat, args) for one in found]
        except Refused as error:
            bad.append(f"{where}: {error}")

    summary = f"{len(bad)} of {len(rows)} rows in {args.data} cannot be used. {' '.join(bad[:1])}"
    if not examples or bad and not args.skip_bad_rows:
        raise Refused(f"{summary} (--skip-bad-rows leaves such rows out)")

    if bad:
        show("left out:", summary)
    return examples

def hold_out(examples: list[RowExample], fraction: float, seed: int):
    """Holds out a share of the questions, each with all its responses."""
    def place(question):
        """In a random order that depends on the seed and on each question alone."""
        return hashlib.sha256(f"{seed} {question}".encode()).digest()

    questions = sorted({e.question for e in examples}, key=place)
    count = min(math.ceil(fraction * len(questions)), len(questions) - 1)
    held_out = set(questions[:count])
    for example in examples:
        example.held_out = example.question in held_out

def prepare(out: Path, chat: Chat, args) -> list[RowExample]:
    """What the rows become is written once: a run that is resumed renders and tokenises nothing."""
    path = out / "examples.jsonl"
    if not path.exists():
        examples = build_examples(read_rows(args.data), chat, args)
        hold_out(examples, args.eval_fraction, args.split_seed)
        remove_what_follows(path)
        write_whole(out / "args.json", json.dumps(identity(args), indent=2))
        write_lines(path, map(vars, examples))
    return [RowExample(**fields) for fields in read_lines(path)]

# -------------------------- sampling: the prompted model answers the rows that have no response
def cut_after_stop(ids: list[int], stops: list[int]) -> list[int]:
    """Everything up to the first stop token, and that one too: the model has to learn to stop."""
    for i, token in enumerate(ids):
        if token in stops:
            return ids[:i + 1]
    return ids

def pad_left(model, prompts: list, prefix: Prefix) -> dict:
    """B prompts -> the arguments of a call: (B, T) ids and mask, on top of the prefix's cache."""
    n = prefix.length
    width = max(map(len, prompts))
    ids = torch.tensor([p[:n] + [-1] * (width - len(p)) + p[n:] for p in prompts])  # -1: padding
    mask = (ids >= 0).long()
    return {"input_ids": ids.clamp(min=0).to(model.device),
            "attention_mask": mask.to(model.device)} | prefix.for_batch(len(ids))

def generate(model, chat: Chat, prompts: list, prefix: Prefix, most: int, temperature: float):
    """B prompts -> B continuations of at most `most` ids, from one left-padded call."""
    width = max(map(len, prompts))

    # A config of ours: what the model's own says of sampling would fill in what is unset.
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=min(most, chat.limit - width), do_sample=temperature > 0,
        pad_token_id=chat.stops[0], eos_token_id=chat.stops, **sampling)

    out = model.generate(**pad_left(model, prompts, prefix))
    return [cut_after_stop(row, chat.stops) for row in out[:, width:].tolist()]

def first_logits(model, prompts: list, prefix: Prefix) -> torch.Tensor:
    """-> (B, V) logits of the first token that a call would sample."""
    model.generation_config = transformers.GenerationConfig(max_new_tokens=1)
    out = model.generate(**pad_left(model, prompts, prefix), return_dict_in_generate=True,
                         output_logits=True)
    return out.logits[0].to(model.dtype)  # in which they were computed

def sampling_prefix(model, prompts: list, prefix: Prefix) -> Prefix:
    """The prefix if padding behind it changes nothing, or none. Refused if padding always does."""
    if not full_attention(prefix):
        prefix = Prefix()  # padding would enter a recurrent state, or take up a window
    extremes = [min(prompts, key=len), max(prompts, key=len)]
    with expect("a model that generates and masks padding, or a response in each row"):
        alone = torch.cat([first_logits(model, [prompt], Prefix()) for prompt in extremes])
        for candidate in (prefix, Prefix()):
            if agree(first_logits(model, extremes, candidate), alone, 1e-3):
                return candidate
        raise ValueError("other logits behind padding")

def sample_responses(model, chat: Chat, examples: list, prefix: Prefix, out: Path, args) -> list:
    """Each example without a response becomes --trajectories examples with one.

    They are kept in a file, a row of data a line: a run that is resumed goes on behind them."""
    asked = [copy.copy(e) for e in examples if e.response is None for _ in range(args.trajectories)]
    # The longest first: if a batch does not fit into memory, the first does not.
    asked.sort(key=lambda e: len(e.teacher_prompt), reverse=True)

    path = out / "trajectories.jsonl"
    if asked and not path.exists():
        remove_what_follows(path)
    rows = read_lines(path) if path.exists() else []
    size = 4 * args.batch_size  # generating takes less memory than training
    write_every = math.ceil(len(asked) / (100 * size))  # batches: the file is written whole
    left = range(len(rows), len(asked), size)
    with teacher_mode(model):
        if left:
            prefix = sampling_prefix(model, [e.teacher_prompt for e in asked], prefix)
        for i in tqdm(left, "sampling", unit="batch", disable=not left):
            torch.manual_seed(args.seed * 10**6 + i)  # the same samples, interrupted or not
            batch = asked[i:i + size]
            room = chat.limit - max(len(e.student_prompt) for e in batch)
            said = generate(model, chat, [e.teacher_prompt for e in batch], prefix,
                            min(args.max_new_tokens, room), args.temperature)
            for example, ids in zip(batch, said):
                rows.append({"messages": example.messages, "completion": chat.decode(ids),
                             "ids": ids})
            if i // size % write_every == 0 or len(rows) == len(asked):
                write_lines(path, rows)

    for example, row in zip(asked, rows):
        example.response = row["ids"]
    return [e for e in examples if e.response] + asked

# ---------------------------------------------------------------------- the run: model and training
def gives_a_product(layer) -> bool:
    """Whether it maps (n, in) to (n, out), which LoRA takes for granted. A router gives more."""
    try:
        with torch.no_grad():
            product = layer(layer.weight.new_ones(1, layer.in_features))
        return torch.is_tensor(product) and product.shape == (1, layer.out_features)
    except RuntimeError:  # it takes another shape
        return False

def no_place_for_lora(base) -> list[str]:
    """The linear layers that get no LoRA: those outside the decoder, which no text passes through;
    some with a forward of their own; Mamba's output projections, whose weights are read past it."""
    decoder = set(base.get_decoder().modules())
    names = []
    for name, layer in base.named_modules():
        if not isinstance(layer, torch.nn.Linear) or layer is base.get_output_embeddings():
            continue
        parent = base.get_submodule(name.rpartition(".")[0])
        mamba = name.endswith("out_proj") and hasattr(parent, "A_log") and hasattr(parent, "D")
        own = "transformers" in type(layer).__module__ and not gives_a_product(layer)
        if mamba or own or layer not in decoder:
            names.append(name)
    return names

def load_base(args):
    """-> the model without adapters, in eval mode, on --device."""
    usual = "bfloat16" if "cuda" in args.device else "float32"
    dtype = usual if args.dtype == "auto" else args.dtype
    quantization = None
    if args.dtype == "4bit":
        dtype = "bfloat16"  # of what is computed, and of what is not quantised
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)

    # The adapter names its base: an absolute path loads from anywhere.
    name = os.path.abspath(args.model) if os.path.isdir(args.model) else args.model
    base = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, quantization_config=quantization, device_map=args.device,
        trust_remote_code=args.trust_remote_code).eval()
    for layer in base.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # In 4-bit on a CPU: what it would pack for speed has no gradient.
            layer.support_avx512bf16_for_cpu = False
    return base

def load_model(args) -> tuple:
    """-> the model with adapters, in eval mode, and its frozen head: hidden states -> logits."""
    if transformers.utils.find_adapter_config_file(args.model):
        raise Refused(f"expected a plain model, found an adapter in --model {args.model}: merge it "
                      "first, with PEFT's merge_and_unload")
    with expect(f"--model {args.model} to be a causal language model, on --device {args.device}"):
        base = load_base(args)
        base.config.get_text_config().use_cache = True  # training often saves it as False
        head = make_head(base)

    named = []
    if args.target_modules != "all-linear":
        named = [name.strip() for name in args.target_modules.split(",")]
    torch.manual_seed(args.seed)  # of the LoRA matrices
    excluded = no_place_for_lora(base)
    experts = [name for name, p in base.named_parameters() if "experts" in name and p.dim() == 3]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=args.alpha,
                             target_modules=named or args.target_modules,
                             exclude_modules=excluded)
    with expect(f"--target-modules {args.target_modules} to be linear layers of the model"):
        model = peft.get_peft_model(base, config).eval()
        for name in named:
            if not any(f".{t}".endswith(f".{name}") for t in model.targeted_module_names):
                raise ValueError(f"no {name}")

    # Of experts that are one 3-D parameter, PEFT knows some families.
    without = excluded + [name for name in experts if name not in model.targeted_parameter_names]
    if without:
        kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in without}
        print(f"without LoRA: {', '.join(sorted(kinds))}")

    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            raise Refused("expected --target-modules without the embeddings and the head")
    config.target_modules = sorted(config.target_modules)  # a set, of another order in each run
    return model, head

def full_attention(prefix: Prefix) -> bool:
    """Whether every layer attends to all tokens: no window, no recurrent state."""
    for layer in prefix.cache.layers if prefix.length else []:
        # A layer that does not say that it has no window counts as having one.
        if hasattr(layer, "recurrent_states") or getattr(layer, "is_sliding", True):
            return False
    return True

def exact_prefix(model, prompts: list) -> Prefix:
    """What all prompts start with, if the model goes on from there as it reads a whole prompt."""
    extremes = [min(prompts, key=len), max(prompts, key=len)]
    any_token = [[0], [0]]  # it is never read: the state is that of a prompt's last token
    with teacher_mode(model):
        whole = torch.cat(response_states(model, extremes, any_token, Prefix()))
        try:
            prefix = shared_prefix(model, prompts)
            behind = torch.cat(response_states(model, extremes, any_token, prefix))
            # A batch of another size shows whether the cache can be used twice.
            again = response_states(model, extremes[:1], any_token[:1], prefix)[0]
            if agree(behind, whole, 1e-4) and agree(again, whole[:1], 1e-4):
                return prefix
            reason = "the states differ"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # there are caches of many kinds
            reason = error
    print(f"this model does not go on from its cache, so all prompts are read in full: {reason}")
    model.config.get_text_config().use_cache = False
    return Prefix()

def prepare_student(model, args):
    """Settles whether the student's prompts share prefixes, and checkpoints its layers if asked."""
    prefix = exact_prefix(model, [[0, 0, 1], [0, 0, 2, 3]])  # any prompts show of what kind it is
    if args.gradient_checkpointing or not full_attention(prefix):
        # A layer that runs twice would fill its cache twice, and a recurrent state is overwritten,
        # which a gradient does not allow.
        model.config.get_text_config().use_cache = False
    if args.gradient_checkpointing:
        for layer in model.modules():
            if isinstance(layer, transformers.modeling_layers.GradientCheckpointingLayer):
                # Theirs works in training mode alone, which would turn dropout on.
                layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward,
                                                  use_reentrant=False)

def make_targets(model, examples: list, prefix: Prefix, path: Path, args):
    """Sets every example's target, from the file if it is there."""
    if path.exists():
        with as_written(path):
            read_targets(model, examples, path)
    else:
        check_held(path.parent)
        teacher_targets(model, examples, prefix, path, args.micro_batch_size, tqdm)

def held_out_scores(model, head, held_out: list, args) -> dict:
    """-> (KL, top-1 agreement) of each question, means over its responses; and their means."""
    scores = collections.defaultdict(list)
    pairs = evaluate(model, head, held_out, args.micro_batch_size)
    for example, pair in zip(held_out, pairs):
        scores[example.question].append(pair)
    if not scores:
        return {}
    questions = {question: np.mean(pairs, axis=0).tolist() for question, pairs in scores.items()}
    kl, top1 = np.mean(list(questions.values()), axis=0).tolist()
    if not math.isfinite(kl):
        raise Refused(f"expected a held-out KL, found {kl}: try another --out with --dtype float32")
    return {"eval_kl": kl, "eval_top1": top1, "questions": questions}

def train(model, head, trained: list, held_out: list, args, out: Path) -> list[dict]:
    """Trains the adapters -> a dict for each step, as in OUT/metrics.jsonl; step 0 evaluates."""
    prepare_student(model, args)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(params.values(), weight_decay=0.0)  # each step sets its rate

    path = out / "checkpoint.pt"
    if path.exists():
        with as_written(path):
            weights, state, log = torch.load(path, weights_only=True)
        model.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(state)
    else:
        log = [{"step": 0} | held_out_scores(model, head, held_out, args)]

    per_epoch = math.ceil(len(trained) / args.batch_size)
    for epoch in range((len(log) - 1) // per_epoch, args.epochs):
        plan = batches(trained, args.batch_size, args.seed, epoch)
        bar = tqdm(plan, f"epoch {epoch + 1} of {args.epochs}", unit="step")
        for step, batch in enumerate(bar, len(log)):
            lr = learning_rate(step, args.epochs * per_epoch, args.lr, args.warmup)
            kl, norm = train_step(model, head, batch, list(params.values()), args.micro_batch_size,
                                  args.kl_temperature).tolist()
            if not math.isfinite(kl + norm):
                raise Refused(f"step {step}: KL {kl}, gradient norm {norm}, in "
                              f"{', '.join(e.where for e in batch)}: try another --out with "
                              "--dtype float32 or a lower --lr")

            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
            log.append({"step": step, "kl": kl, "lr": lr, "grad_norm": norm})
            bar.set_postfix(log[-1])

        log[-1] |= held_out_scores(model, head, held_out, args)
        save_checkpoint(out, params, optimizer, log)
    return log

def save_checkpoint(out: Path, params: dict, optimizer, log: list):
    """Order and rate are functions of the step, so this is all that a run goes on from."""
    weights = {name: p.data for name, p in params.items()}
    file = io.BytesIO()
    torch.save((weights, optimizer.state_dict(), log), file)

    write_lines(out / "metrics.jsonl", log)
    write_whole(out / "checkpoint.pt", file.getvalue())

# ------------------------------------------------------------------------------------------- report
def side_by_side(model, chat: Chat, examples: list, args) -> list:
    """At most three questions, answered greedily by the prompted and by the baked model."""
    table = []
    for example in list({e.question: e for e in examples}.values())[:3]:
        with teacher_mode(model):
            prompted = generate(model, chat, [example.teacher_prompt], Prefix(),
                                args.max_new_tokens, 0)
        baked = generate(model, chat, [example.student_prompt], Prefix(), args.max_new_tokens, 0)
        table.append({"question": example.question, "prompted": chat.decode(prompted[0]),
                      "baked": chat.decode(baked[0])})
    return table

def standard_error(values: np.ndarray) -> float | None:
    """Of the mean of independent values; of one value there is none."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None

def held_out_numbers(before: dict, after: dict) -> dict:
    """Scores of each question -> what a paper prints: means over questions, and their errors."""
    names = ["kl_before", "top1_before", "kl_after", "top1_after"]
    scores = np.array([[*before[question], *after[question]] for question in before])
    report = {"recovered": None, "recovered_error": None, "questions": []}
    for question, values in zip(before, scores.tolist()):
        report["questions"].append({"question": question} | dict(zip(names, values)))
    for name, values in zip(names, scores.T):
        report[name] = float(values.mean())
        report[f"{name}_error"] = standard_error(values)

    if report["kl_before"] >= 1e-3:
        left = report["kl_after"] / report["kl_before"]
        report["recovered"] = 1 - left
        # The error of a ratio of means, to first order.
        residuals = scores[:, 2] - left * scores[:, 0]
        report["recovered_error"] = standard_error(residuals / report["kl_before"])
    return report

def make_report(trained: list, held_out: list, log: list) -> dict:
    """Every number that the terminal shows and a paper prints, and plain words on them."""
    prompts = {e.messages[0]["content"] for e in trained}
    report = {"prompt": prompts.pop() if len(prompts) == 1 else f"{len(prompts)} different ones",
              "steps": len(log) - 1, "trained_responses": len(trained),
              "held_out_responses": len(held_out), "notes": []}
    if held_out:
        report |= held_out_numbers(log[0]["questions"], log[-1]["questions"])
        recovered = report["recovered"]
        if recovered is None:
            report["notes"].append("KL before is under 0.001: the prompt does nothing to bake.")
        elif recovered < 0:
            report["notes"].append("Held-out KL rose, the bake failed: try a lower --lr.")
        elif recovered < 0.2:
            report["notes"].append("Little was recovered: try more rows, --epochs or --rank.")

    if len(report.get("questions", [])) < 5:
        report["notes"].append("Fewer than 5 questions are held out: the numbers are rough.")
    return report

def write_results(model, chat: Chat, report: dict, out: Path):
    """The adapter, loaded back to see that it is what was trained, and its report last."""
    check_held(out)
    with expect(f"to save the adapter in {out}, and to load it again"):
        model.save_pretrained(out)
        chat.tokenizer.save_pretrained(out)
        for path in out.glob("adapter_*"):
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        model.load_adapter(out, "saved", torch_device=str(model.device))
    saved = peft.get_peft_model_state_dict(model, adapter_name="saved")
    for name, weights in peft.get_peft_model_state_dict(model).items():
        if not torch.equal(weights, saved[name]):
            raise Refused(f"expected the adapter in {out} to be what was trained: PEFT loads "
                          f"{name} otherwise")
    write_whole(out / "report.json", json.dumps(report, indent=2))

def escaped(text: str) -> str:
    """Without the control characters that could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)

def show(title: str, text: str):
    print(escaped(f"--- {title}\n{text}"))

# -------------------------------------------------------------------------- files: whole, or absent
def write_whole(path: Path, data: str | bytes):
    """Whoever finds `path` finds all of it."""
    check_held(path.parent)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

def write_lines(path: Path, records):
    """A JSON object a line."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))

def as_written(path: Path):
    """For reading it: damage is named, with the way out."""
    return expect(f"{path} as it was written: delete it, and the same command makes it again")

PHASES = ["examples.jsonl", "trajectories.jsonl", "targets", "checkpoint.pt"]
def remove_what_follows(path: Path):
    """What was made of a file that was there before: that one may have held something else."""
    for name in PHASES[PHASES.index(path.name) + 1:]:
        path.with_name(name).unlink(missing_ok=True)

def read_lines(path: Path) -> list:
    with as_written(path):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if not records:
            raise ValueError("an empty file")
        return records

def identity(args) -> dict:
    """What makes a run the same run: its arguments and data, and its model's files or commit."""
    with expect(f"a file at --data {args.data}"):
        data = Path(args.data).read_bytes()

    commit = None
    files = []
    if os.path.isdir(args.model):
        for path in sorted(Path(args.model).iterdir()):
            if path.is_file():
                files.append([path.name, path.stat().st_size, path.stat().st_mtime])
    else:
        with expect(f"--model {args.model} to be a folder, or a model on the hub (or, with "
                    "HF_HUB_OFFLINE=1, in its cache)"):
            if huggingface_hub.is_offline_mode():
                config = transformers.utils.cached_file(args.model, "config.json")
                commit = Path(config).parent.name  # the cache has a folder for each
            else:
                commit = huggingface_hub.model_info(args.model, timeout=5).sha
    return vars(args) | {"data_sha256": hashlib.sha256(data).hexdigest(), "model_files": files,
                         "model_commit": commit}

HELD = {}  # folders that this process has claimed: the inode of the .lock in each
def check_held(out: Path):
    """Raises Refused if OUT was removed, or made anew by another run, since it was claimed."""
    lock = out / ".lock"
    if out in HELD and not (lock.exists() and lock.stat().st_ino == HELD[out]):
        raise Refused(f"expected --out {out} as this run left it, found it removed or made anew: "
                      "nothing more is written there")

@contextlib.contextmanager
def claim(out: Path, args):
    """Holds OUT for this run. Raises Refused if it is another's, or at work."""
    with expect(f"--out {out} to be a folder"):
        out.mkdir(parents=True, exist_ok=True)
    may_change = {"out", "micro_batch_size", "gradient_checkpointing"}  # they train the same
    new = identity(args)

    if (out / "args.json").exists():
        with expect(f"{out}/args.json as it was written: delete the folder"):
            old = dict(json.loads((out / "args.json").read_text()))
        for name in new.keys() - may_change:
            if old.get(name) != new[name]:
                raise Refused(f"expected the run that --out {out} holds, with {name} "
                              f"{old.get(name)!r:.200}, found {new[name]!r:.200}")
    elif set(os.listdir(out)) - {".lock", "args.json.part"}:
        raise Refused(f"expected a new folder as --out {out}, found files of something else")

    lock = filelock.FileLock(out / ".lock")
    with expect(f"no other run to be at work in --out {out}"):
        lock.acquire(blocking=False)
    HELD[out] = (out / ".lock").stat().st_ino
    try:
        yield
    finally:
        del HELD[out]
        lock.release()
        if not (out / "args.json").exists():
            (out / ".lock").unlink(missing_ok=True)  # a run that was refused leaves no file

# ------------------------------------------------------------------------------------- command line
FLAGS = {  # name: (default, meaning); what has no default is required
    "model": (None, "folder or hub name of a causal language model"),
    "data": (None, "rows in a .jsonl file, or a question a line in a .txt file"),
    "prompt": ("", "the system prompt to bake, or the rows' own system messages"),
    "student-prompt": ("", "a system message that the student keeps"),
    "template-kwargs": ("{}", "JSON, given to the chat template on both sides"),
    "ignore": ("", "keys of the data to leave out, with commas between"),
    "skip-bad-rows": (False, "leave out, and count, the rows that cannot be used"),
    "trajectories": (4, "responses sampled for each row that has none"),
    "max-new-tokens": (128, "tokens of the longest of them"),
    "temperature": (1.0, "of the sampling, with top-p 1 and top-k 0; 0 is greedy"),
    "rank": (16, "of the LoRA matrices"),
    "alpha": (32.0, "LoRA alpha: updates are scaled by alpha / rank"),
    "target-modules": ("all-linear", "or names of linear layers, with commas between"),
    "epochs": (3, "passes over the training responses"),
    "batch-size": (8, "responses per optimizer step; 4 times as many are sampled at once"),
    "micro-batch-size": (8, "responses per forward pass: fewer save memory"),
    "lr": (1e-3, "peak learning rate of AdamW; then a cosine to 0"),
    "warmup": (0.1, "share of the steps in which it rises"),
    "kl-temperature": (1.0, "softmax temperature of the trained KL"),
    "gradient-checkpointing": (False, "less memory, a third more time"),
    "eval-fraction": (0.15, "share of the questions held out"),
    "split-seed": (0, "of the choice of them"),
    "dtype": ("auto", "float32, bfloat16, float16 or 4bit; auto is bfloat16 on cuda"),
    "device": ("cuda" if torch.cuda.is_available() else "cpu", "cuda, cuda:1, cpu, ..."),
    "seed": (0, "of sampling, LoRA and data order"),
    "out": ("runs/bake", "folder for adapter, report and work in progress"),
    "trust-remote-code": (False, "run code that the model's folder brings"),
}

def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line -> namespace of plain values."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, (default, meaning) in FLAGS.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(f"--{name}", default=default, type=kind, required=default is None,
                                help=meaning)

    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if type(value) not in (int, float):
            continue
        least = 1 if isinstance(value, int) else 1e-9  # a count, or a number above 0
        if name in ("temperature", "eval_fraction", "seed", "split_seed", "warmup"):
            least = 0
        below = 1 if name in ("eval_fraction", "warmup") else 2**32
        if not least <= value < below:  # so NaN is refused too
            parser.error(f"--{name.replace('_', '-')}: expected {least} or more, and less than "
                         f"{below}, found {value}")

    args.ignore = [key.strip() for key in args.ignore.split(",") if key.strip()]
    args.template_kwargs = parse_json(args.template_kwargs, "--template-kwargs")
    args.micro_batch_size = min(args.micro_batch_size, args.batch_size)
    if args.temperature == 0:
        args.trajectories = 1  # greedy ones are all alike
    return args

# --------------------------------------------------------------------------------------------- main
def main(argv: list[str] | None = None) -> dict:
    """Runs, goes on with, or shows what the command line asks for -> its report."""
    args = parse_args(argv)
    out = Path(args.out)
    with claim(out, args):
        done = [out / "report.json", out / "adapter_model.safetensors"]
        if not all(path.exists() for path in done):
            done[0].unlink(missing_ok=True)
            bake(args, out)
        for name in ("targets", "checkpoint.pt"):  # work in progress, and large
            (out / name).unlink(missing_ok=True)
        with as_written(done[0]):
            report = json.loads(done[0].read_text())

    brief = {name: value for name, value in report.items() if name != "questions"}
    show(f"{out} is done", json.dumps(brief, indent=2, ensure_ascii=False))
    if report.get("recovered_error") is not None:
        print(f"recovered {report['recovered']:.3f} ± {report['recovered_error']:.3f}")
    return report

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII alone
    try:
        main()
    except Refused as error:
        sys.exit(escaped(str(error)))
    except (MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"out of memory: {error!r}: go on with a smaller --micro-batch-size; if it was "
                 "sampling, begin another --out with a smaller --batch-size")
    except (KeyboardInterrupt, OSError) as error:
        sys.exit(f"stopped by {error!r}: the same command goes on from what --out holds")
