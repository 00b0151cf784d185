# SPDX-License-Identifier: MIT
"""Tests of bake.py on the data and the chat templates that people have. Laws 1, 2 and 10: both
sides end in the same ids, a response is as the model would say it, a row is used whole or refused.
"""
import copy
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bake
from bake import Refused, RowExample
from test_bake import (PLAIN, REPLY, SYSTEM, TURN, USER, Base, built, chat_for, dialog, folders,
                       make_model, make_tokenizer, parse, refused, template_of, user, write)

# ----------------------------------------------------------------------------------- rows and files
UNTRAINED = REPLY | {"weight": 0}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]

def found(*pairs):
    """What a row is read as: (messages, response) without ids."""
    return [(messages, response, None) for messages, response in pairs]

FIRST = [USER], "Ho"
SECOND = [USER, REPLY, USER], "Ho"
ONE = found(FIRST)
ASKED = found(([USER], None))
BOTH = found(FIRST, SECOND)
SHAPES = [  # what is read, and a row that says it
    (ONE, dialog(USER, REPLY)),
    (ONE, dialog(USER, completion="Ho")),
    (ONE, dialog(USER, response="Ho")),
    (ONE, {"prompt": "Hi", "completion": "Ho"}),
    (ONE, {"prompt": [USER], "completion": [REPLY]}),
    (ONE, {"prompt": "Hi", "response": "Ho", "answer": None, "history": [], "label": ""}),
    (ONE, {"prompt": "Hi", "answer": "Ho"}),
    (ONE, {"question": "Hi", "answer": "Ho"}),
    (ONE, {"user_message": "Hi", "response": "Ho"}),
    (ONE, {"instruction": "Hi", "output": "Ho", "input": ""}),
    (ONE, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}),
    (ONE, dialog(user(PARTS), REPLY)),
    (ONE, dialog(USER, REPLY | {"weight": 1, "tool_calls": []})),
    (ONE, dialog(USER, REPLY, source="web", id=7)),
    (ASKED, dialog(USER)),
    (ASKED, {"prompt": "Hi"}),
    (ASKED, {"query": "Hi", "completion": None}),
    (ASKED, {"prompt": "Hi", "completion": []}),
    (ASKED, {"prompt": "Hi", "completion": ""}),
    ([([USER], "", [256])], {"prompt": "Hi", "completion": "", "ids": [256]}),
    (found(([SYSTEM, USER], None)), {"system": "S", "prompt": "Hi"}),
    (found(([SYSTEM, USER], None)), {"system_prompt": "S", "question": "Hi"}),
    (found(([SYSTEM, USER], None)), dialog(SYSTEM | {"role": "developer"}, USER)),
    (found(([user("{{n}} {0} %s")], None)), dialog(user("{{n}} {0} %s"))),
    (BOTH, dialog(USER, REPLY, USER, REPLY)),
    (BOTH, {"prompt": "Hi", "completion": [REPLY, USER, REPLY]}),
    (BOTH + found(([USER, REPLY, USER, REPLY, USER], None)),
     dialog(USER, REPLY, USER, REPLY, USER)),
    (found(SECOND), {"prompt": [USER, REPLY, USER], "completion": "Ho"}),
    (found(([USER, UNTRAINED, USER], "Ho")), dialog(USER, UNTRAINED, USER, REPLY)),
    (found(([USER | {"weight": 0}], "Ho")), dialog(USER | {"weight": 0}, REPLY)),
    (found(([user("Hi\n\nyou")], "Ho")), {"instruction": "Hi", "input": "you", "output": "Ho"}),
    (found(([user("Hi\n\nyou")], "Ho")), {"instruction": "Hi", "context": "you", "response": "Ho"}),
]

@pytest.mark.parametrize("expected, row", SHAPES)
def test_every_shape_of_row(row, expected):
    assert bake.conversations(row, ["source", "id"]) == expected

BAD_ROWS = [  # why, and the row
    ("an object with .*, found 7", 7),
    ("an object with .*, found 'Hi'", "Hi"),
    ("either messages or a prompt, found neither", {}),
    ("either messages or a prompt, found prompt, messages", {"prompt": "Hi", "messages": [USER]}),
    ("one prompt, found two among prompt, question: .* --ignore",
     {"prompt": "Hi", "question": "Ho"}),
    ("one completion, found two", {"prompt": "Hi", "response": "N", "answer": "Ho"}),
    (".*found text: to leave out what is not read, --ignore text", {"text": "Hi"}),
    (".*found history,label", {"prompt": "Hi", "history": [["a", "b"]], "label": False}),
    (".*found chosen", {"prompt": "Hi", "chosen": "Ho"}),
    (".*found input", {"prompt": "Hi", "input": "you"}),
    (".*found input", dialog(USER, REPLY, instruction=None, input="you")),
    ("the keys type, text, found role,content", {"prompt": "Hi", "system": [USER, REPLY]}),
    (".*found tool_calls", dialog(USER, REPLY | {"tool_calls": [{}]})),
    (".*found reasoning_content", dialog(USER, REPLY | {"reasoning_content": "Hm"})),
    (".*found audio", dialog(USER | {"audio": "a.wav"})),
    (".*found image_url", dialog(user([{"type": "image_url", "image_url": "a.png"}]))),
    ("text as the user message, found .*'image'", dialog(user([{"type": "image"}]))),
    ("a role of system, .*found 'tool'", dialog(USER | {"role": "tool"})),
    ("a role of .* found None", dialog({"role": None, "content": "Hi"})),
    ("text as the user message, found 5", {"prompt": 5}),
    ("text as the user message, found 7", {"instruction": "Hi", "input": 7}),
    ("text as the assistant message, found 3", {"prompt": "Hi", "completion": 3}),
    ("an object with role, content, weight, found 7", dialog(7)),
    ("text as the user message, found 0", {"instruction": "Hi", "input": 0}),
    ("the keys type, text, found role", {"instruction": [USER], "input": "you"}),
    ("text as the system message, found False", {"prompt": "Hi", "system": False}),
    ("text as the user message, found .*'value'",
     dialog(user([PARTS[0] | {"text": {"value": 1}}]))),
    ("a weight of 0 or 1, found 0.5", dialog(USER, REPLY | {"weight": 0.5})),
    (".*found assistant, user", dialog(REPLY, USER)),
    (".*found user, assistant, assistant", dialog(USER, REPLY, completion="Ho")),
    (".*found user, user", dialog(USER, USER)),
    (".*found system, system, user", dialog(SYSTEM, USER, system="S")),
    ("a response to train on, .*found user, assistant", dialog(USER, REPLY | {"weight": "0"})),
    ("a response to train on, .*found user, assistant", {"prompt": [USER, REPLY]}),
    ("a response to train on, .*found system", dialog(SYSTEM)),
]

@pytest.mark.parametrize("reason, row", BAD_ROWS)
def test_law_10_bad_rows_say_why(reason, row):
    """A key that is not read, an order that is none, or what is no text: refused, with the keys."""
    refused(f"expected {reason}", bake.conversations, row, [], error=Refused)

def test_files(tmp_path):
    """BOM, CRLF, blank lines, U+2028 in strings; a file of another kind is refused."""
    def read(name, text):
        path = write(tmp_path / name, text)
        rows = [(where.removeprefix(f"{path}:"), row) for where, row in bake.read_rows(path)]
        return [(number, bake.parse_json(row, "a row")) for number, row in rows]

    rows = read("a.jsonl", '\ufeff{"prompt": "a\u2028é"}\r\n\r\n["x"]\n')
    assert rows == [("1", {"prompt": "a\u2028é"}), ("3", ["x"])]
    rows = read("a.txt", "Why?\n  \nHow?\n")
    assert rows == [("1", {"prompt": "Why?"}), ("3", {"prompt": "How?"})]
    for name, text, reason in [
            ("d.jsonl", '{"a": 1, "a": 2}', "in JSON, found ValueError: a key twice among a, a"),
            ("c.jsonl", '{"prom', "a row in JSON, found JSONDecodeError"),
            ("c.txt", b"a\xff", "c.txt to be .* in UTF-8, found UnicodeDecodeError"),
            ("c.json", "[]", "c.json to be .*another kind of file: README has")]:
        refused(reason, read, name, text)
    refused("No such file", bake.read_rows, str(tmp_path / "missing.jsonl"))
    refused("expected rows in .*e.txt, found none", read, "e.txt", " \n")

# ------------------------------------------------------------------- prompts, templates, responses
HI = "<|user|>Hi<|end|><|assistant|>"
FOLDED = "<|user|>PIRATE\n\nHi<|end|><|assistant|>"
ARR = "<|system|>PIRATE<|end|>"
TINY = "<|system|>I am Tiny.<|end|>"
SKIPS_SYSTEM = "{% if m.role != 'system' %}" + TURN + "{% endif %}"
MERGES = ("{% if m.role != 'system' %}<|{{ m.role }}|>"
          "{% if loop.index0 and loop.previtem.role == 'system' %}{{ loop.previtem.content }}\n"
          "{% endif %}{{ m.content }}<|end|>{% endif %}")

def leading(text, start="<|assistant|>"):
    """A template that puts `text` before what an assistant says."""
    said = TURN.replace("}}|>", "}}|>{{ '%s' if m.role == 'assistant' }}" % text)
    return template_of(said, start)

@dataclasses.dataclass
class Case:
    """A template, what both sides read, and what stands before the text of a response."""
    template: str
    teacher: str = ARR + HI
    student: str = HI
    lead: str = ""

TEMPLATES = {
    "plain": Case(PLAIN),
    "refuses": Case(template_of("{{ raise_exception('no') if m.role == 'system' }}" + TURN),
                    FOLDED),
    "drops": Case(template_of(SKIPS_SYSTEM), FOLDED),
    "merges": Case(template_of(MERGES), FOLDED.replace("\n\n", "\n")),
    "default": Case("{% if messages[0].role != 'system' %}" + TINY + "{% endif %}" + PLAIN,
                    student=TINY + HI),
    "no stop": Case(template_of("<|{{ m.role }}|>{{ m.content }}"
                                "{{ '<|pad|>' if m.role != 'assistant' }}"),
                    (ARR + HI).replace("end", "pad"), HI.replace("end", "pad")),
    "a line": Case(template_of(TURN + "\n"), (ARR + HI).replace("d|>", "d|>\n"),
                   HI.replace("d|>", "d|>\n")),
    "strict": Case(template_of("{{ raise_exception('must alternate') if not "
                               "loop.changed(m.role) }}" + TURN)),
    "empties": Case(leading("<think></think>")),  # the model would not emit those
    "leads": Case(leading(" "), lead=" "),
    "channels": Case(leading("<|pad|>"), lead="<|pad|>"),
    "closed": Case(template_of(TURN, "<|assistant|><think></think>"),
                   ARR + HI + "<think></think>", HI + "<think></think>"),
    "channel": Case(template_of(TURN, "<|assistant|><|channel>thought\\n<channel|>"),
                    ARR + HI + "<|channel>thought\n<channel|>",
                    HI + "<|channel>thought\n<channel|>"),
    "opened": Case(leading("<think>\\n\\n</think>\\n\\n", "<|assistant|><think>\\n"),
                   ARR + HI + "<think>\n",
                   HI + "<think>\n", lead="\n</think>\n\n"),
}

@pytest.mark.parametrize("name", TEMPLATES)
def test_laws_1_and_2_chat_templates(folders, name):
    """The sides differ in the prompt alone; what leads into answers is in the response, once."""
    case = TEMPLATES[name]
    chat = chat_for(folders(), case.template)
    decode = chat.tokenizer.decode
    rows = [dialog(USER, REPLY, USER, REPLY), {"prompt": "Hi", "completion": "Ho"},
            {"prompt": "Hi"}]
    one, two, led, asked = built(rows, chat, "--prompt", "PIRATE")
    assert decode(one.teacher_prompt) == case.teacher
    assert decode(one.student_prompt) == case.student
    for e in (one, two, led):
        assert decode(e.response) == case.lead + "Ho<|end|>"
    assert asked.teacher_prompt == one.teacher_prompt and asked.response is None
    assert one.messages == [SYSTEM | {"content": "PIRATE"}, USER]
    assert chat.fold_system == (case.teacher == FOLDED)
    own, = built([dialog(SYSTEM, USER)], chat, "--student-prompt", "Be.")
    assert decode(own.student_prompt) == case.teacher.replace("PIRATE", "Be.")

@pytest.mark.parametrize("name, response, expected", [
    ("opened", "H</think>Ho", None),  # would be a second block
    ("opens and shows", "<think>\nH</think>Ho", "H</think>Ho<|end|>"),
    ("opens and shows", "Ho", None),
    ("closed", "<think></think>Ho", "Ho<|end|>"),
    ("plain", "<div></div>Ho", "<div></div>Ho<|end|>"),
    ("starts", "Ho", "Ho<|end|>"),
    ("plain", "<think>H</think>Ho", "<think>H</think>Ho<|end|>"),
    ("opens alone", "Ho", None),  # it would land inside the thoughts
    ("closed", "Use the <think> tag.", "Use the <think> tag.<|end|>"),
    ("opens alone", "H</think>Ho", "H</think>Ho<|end|>"),
    ("plain", "H<think></think>Ho", "H<think></think>Ho<|end|>"),
    ("opens seed's", "Ho", None),
    ("opens both", "Ho", None),
    ("opens both", "H</think>Ho", "H</think>Ho<|end|>"),
    ("closed", "<think>H</think>Ho", None),  # a second block
    ("closed", "<think>Ho", None),
    ("other start", "Ho", None),  # how an answer begins is not to be seen
])
def test_thoughts_in_given_responses(folders, name, response, expected):
    """A response stands where the model would say it, or it is refused with the way out."""
    templates = {"opens alone": template_of(TURN, "<|assistant|><think>"),
                 "opens seed's": leading("<seed:think>", "<|assistant|><seed:think>"),
                 "opens and shows": template_of(TURN, "<|assistant|><think>\\n"),
                 "starts": leading("<AI>", "<|assistant|><AI>"),
                 "opens both": leading("<think>", "<|assistant|><think>"),
                 "other start": template_of(TURN, "<|assistant|><|pad|>")}
    template = templates.get(name) or TEMPLATES[name].template
    chat = chat_for(folders(), template)
    rows = [{"prompt": "Hi", "completion": response}]
    if expected is None:
        refused("f:1: .*--template-kwargs", built, rows, chat, "--prompt", "P")
    else:
        e, = built(rows, chat, "--prompt", "P")
        assert chat.tokenizer.decode(e.response) == expected

@pytest.mark.parametrize("prompt, row, reason, template", [
    ("", {"prompt": "Hi"}, "one prompt .*found neither", PLAIN),
    ("P", dialog(SYSTEM, USER), "one prompt .*found both", PLAIN),
    ("P", {"prompt": "\ud800"}, "found .*Error", PLAIN),
    ("P", {"prompt": " "}, "expected text that", PLAIN),
    ("P", {"prompt": "a", "completion": "<|user|>"}, "without control tokens", PLAIN),
    ("", dialog(SYSTEM, user("a<|end|>")), "without control tokens", PLAIN),
    ("P" * 600, {"prompt": "Hi"}, "at most 512 tokens.* found 6", PLAIN),
    ("P", {"prompt": "Hi", "completion": "o" * 600}, "at most 512 tokens.* found 6", PLAIN),
    ("P", dialog(USER, UNTRAINED, user("no")), "text that the template shows, .*'no'",
     "{{ messages[0].content + messages[1].content }}"),
    ("P", {"prompt": "Hi", "completion": " "}, "expected a response with text", PLAIN),
    ("P", dialog(USER, REPLY | {"content": ""}), "expected a response with text", PLAIN),
    ("P", dialog(USER, UNTRAINED, USER), "that the chat template takes.*nope",
     PLAIN + "{{ raise_exception('nope') if messages[2] }}"),
    ("P", {"prompt": "Hi", "completion": "Ho", "ids": [1]}, "ids that are the completion's", PLAIN),
    ("P", {"prompt": "Hi", "completion": "Ho", "ids": [256, 72, 111]}, "ids that are", PLAIN),
    ("P", {"prompt": "Hi", "completion": "Ho", "ids": ["x"]}, "ids that are", PLAIN),
    ("P", {"prompt": "Hi", "completion": "Ho", "ids": 7}, "ids that are", PLAIN),
    ("P", {"prompt": "Hi", "ids": [7]}, "ids that are the completion's", PLAIN),
])
def test_law_10_prompts_that_do_not_fit_together(folders, prompt, row, reason, template):
    """A row that no honest pair of sides can be made of is refused with its place."""
    chat = chat_for(folders(), template)
    refused(f"f:1: .*{reason}", built, [row], chat, "--prompt", prompt)

def test_a_response_is_not_cut_at_a_stop_token_within(folders):
    chat = copy.copy(chat_for(folders()))
    chat.stops = [256, *chat.encode("\n")]
    rows = [{"prompt": "Hi", "completion": "a\nb"}]
    refused("f:1: .*without a stop token in it", built, rows, chat, "--prompt", "P")

def test_bad_rows_are_counted(folders, capsys, tmp_path):
    """And refused with the first reason, or left out with --skip-bad-rows; none left is refused."""
    chat = chat_for(folders())
    data = write(tmp_path / "rows.jsonl", '{"prompt": "a", "answer": " "}\n5\n{"pro\n'
                                          '{"prompt": "b", "answer": "c"}\n')
    rows = bake.read_rows(data)
    args = parse("x", "--prompt", "P", data=data)
    first = f"3 of {{}} rows in {data} cannot be used. {data}:1: expected a response with text"
    refused(first.format(4), bake.build_examples, rows, chat, args)
    args.skip_bad_rows = True
    kept, = bake.build_examples(rows, chat, args)
    assert kept.where == f"{data}:4"
    assert f"--- left out:\n{first.format(4)}" in capsys.readouterr().out
    refused(first.format(3), bake.build_examples, rows[:3], chat, args)

def test_law_1_sampled_ids_are_kept(folders):
    """They may hold control tokens, as a model may say them, and end without a stop token."""
    chat = chat_for(folders())
    for ids in ([72, 111], [72, 111, 256], [64, 258], [256]):
        row = {"prompt": "Hi", "completion": chat.decode(ids), "ids": ids}
        e, = built([row], chat, "--prompt", "P")
        anew, = built([row | {"completion": "Ho"}], chat, "--prompt", "P", "--ignore", " ids,")
        assert e.response == ids and chat.tokenizer.decode(anew.response) == "Ho<|end|>"

@pytest.mark.parametrize("pad", [None, "<|end|>", "<|pad|>"])
def test_one_bos_and_any_pad(folders, tmp_path, pad):
    """Tokenizer and template both add a BOS: one a side, none in a response."""
    template = "<|system|>" + PLAIN
    own = make_tokenizer(template, pad, bos="<|system|>")
    folder = make_model(tmp_path / "m", tokenizer=own)
    assert own("a").input_ids[0] == 257  # it would add one
    rows = [{"prompt": "Hi", "completion": "Ho"}]
    e, = built(rows, chat_for(folder, template), "--prompt", "P")
    plain, = built(rows, chat_for(folders(), template), "--prompt", "P")
    assert vars(e) == vars(plain)
    assert e.teacher_prompt.count(257) == 2 and e.student_prompt.count(257) == 1
    assert e.response == [*own.encode("Ho", add_special_tokens=False), 256]

class Merging:
    """A tokenizer that marks the start of a text with a space, and merges two spaces or lines."""
    stops = [0]

    def __init__(self, whole):
        self.whole = whole

    def render(self, messages, answer):
        return self.whole

    def encode(self, text):
        pieces = re.findall("\n\n|  |.", text and " " + text, re.S)
        return [ord(piece) if len(piece) == 1 else 1000 for piece in pieces]

@pytest.mark.parametrize("prompt, response, expected", [
    (">\n", "Ho", [72, 111, 0]), (">\n", "\nHo", [10, 72, 111, 0]),
    ("> ", " Ho", [32, 72, 111, 0])])
def test_responses_are_encoded_as_the_model_would_emit_them(prompt, response, expected):
    """No mark of a text's start inside a response, no token over the seam with the prompt."""
    chat = Merging(prompt + response)
    assert bake.encode_response(chat, [], prompt, response) == expected

def test_prompts_that_end_otherwise_are_refused(folders):
    """As where the system prompt turns thinking off: the student would answer in its thoughts."""
    template = PLAIN.replace("<|assistant|>", "<|assistant|><think>").replace(
        "{% endif %}", "{{ '</think>' if '/no' in messages[0].content }}{% endif %}")
    chat = chat_for(folders(), template)
    for row in ({"prompt": "Hi"}, {"prompt": "think", "completion": "Ho"}):
        refused("f:1: .*prompts to end alike, found .*think>' and .*<think>'.*--template-kw",
                built, [row], chat, "--prompt", "P /no")
    assert built([{"prompt": "Hi"}], chat, "--prompt", "P")

def test_templates_that_fold_white_space(folders):
    template = PLAIN.replace("m.content | trim", "m.content.split() | join(' ')")
    chat = chat_for(folders(), template)
    e, = built([{"prompt": "a\n\nb", "completion": "c\n\nd"}], chat, "--prompt", "P")
    assert chat.tokenizer.decode(e.response) == "c d<|end|>"

def test_short_questions_end_alike_behind_short_marks(folders):
    """What both sides end in is what follows the question, however short the two are."""
    template = "{% for m in messages %}[{{ m.role[0] }}] {{ m.content }}{% endfor %}/"
    e, = built([{"prompt": "Hi"}], chat_for(folders(), template), "--prompt", "P")
    assert chat_for(folders(), template).tokenizer.decode(e.student_prompt) == "[u] Hi/"

def test_longrope_ends_where_its_states_change(folders):
    """Past that, they depend on the longest row of a batch."""
    base = Base(folders())
    base.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert bake.Chat(make_tokenizer(), base, {}).limit == 64
    assert chat_for(folders()).limit == 512

def test_tokenizers_that_lack_something_are_refused(folders):
    tokenizer = make_tokenizer(None)
    base = Base(folders())
    refused("chat_template is not set", bake.Chat, tokenizer, base, {})
    tokenizer.eos_token = None
    base.generation_config.eos_token_id = None
    refused("stop tokens below 272, .* found \\[\\]", bake.Chat, tokenizer, base, {})
    base.generation_config.eos_token_id = [256, 272]
    refused("stop tokens below 272, .* found \\[256, 272\\]", bake.Chat, tokenizer, base, {})

def test_the_split_is_by_question():
    """All responses to a question are on one side, whatever the order; one question is trained."""
    examples = [RowExample([], [], [i], where=f"r{i}", messages=[], question=f"q{i % 7}")
                for i in range(21)]
    bake.hold_out(examples, 0.25, seed=0)
    held_out = {e.question for e in examples if e.held_out}
    trained = {e.question for e in examples if not e.held_out}
    assert len(held_out) == 2 and not held_out & trained
    bake.hold_out(examples[::-1], 0.25, seed=0)
    assert {e.question for e in examples if e.held_out} == held_out
    bake.hold_out(examples[:1], 0.25, seed=0)
    assert not examples[0].held_out

def test_the_split_has_a_seed_of_its_own(folders, tmp_path):
    data = write(tmp_path / "q.txt", "\n".join(f"Question {i}?" for i in range(20)))

    def held_out(name, *flags):
        args = parse(folders(), "--prompt", "P", *flags, data=data)
        (tmp_path / name).mkdir()
        examples = bake.prepare(tmp_path / name, chat_for(folders()), args)
        return [e.question for e in examples if e.held_out]

    assert held_out("a") == held_out("b", "--seed", 1) != held_out("c", "--split-seed", 1)

# ---------------------------------------------------------------------------------------- any input
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.text(max_size=3) | st.sampled_from("role content from value type text weight".split()),
        inner, max_size=3), max_leaves=8)
TURNS = st.lists(st.fixed_dictionaries({
    "role": st.sampled_from(["system", "user", "assistant", "tool"]),
    "content": st.text(max_size=6) | JSON}), max_size=5)
KEYS = "messages prompt completion response question ids system instruction input tools".split()
ROW = JSON | st.dictionaries(st.sampled_from(KEYS), JSON | TURNS | st.text(max_size=9), max_size=4)
TEXT = st.text("abAB<|>{}%é \n", min_size=1, max_size=9).filter(str.strip)

@given(rows=st.lists(ROW, max_size=4), prompt=st.sampled_from(["", "Be a."]),
       name=st.sampled_from(["f.jsonl", "f.txt"]), noise=st.binary(max_size=5))
@settings(max_examples=300)
def test_law_10_any_file_is_read_or_refused_by_line(folders, tmp_path_factory, rows, prompt, name,
                                                    noise):
    """Whatever the file holds: examples for which laws 1 and 2 hold, or a line that says where."""
    text = "\n".join(map(json.dumps, rows))
    path = write(tmp_path_factory.getbasetemp() / name, text.encode() + noise)
    chat = chat_for(folders())
    args = parse("x", "--prompt", prompt, data=path)
    try:
        examples = bake.build_examples(bake.read_rows(path), chat, args)
    except Refused as error:
        assert path in str(error)
        return
    for e in examples:
        assert e.response is None or e.response[-1] == 256 or e.response
        assert e.teacher_prompt[-1] == e.student_prompt[-1]
        assert e.teacher_prompt != e.student_prompt
        decode = chat.tokenizer.decode
        assert decode(e.student_prompt) in decode(e.teacher_prompt)

@given(name=st.sampled_from(sorted(set(TEMPLATES) - {"opened", "leads", "channels"})), prompt=TEXT,
       turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
@settings(max_examples=150)
def test_laws_1_and_2_for_any_template(folders, name, prompt, turns):
    """The prompt is in the teacher's context alone; both end alike, in the response and a stop."""
    chat = chat_for(folders(), TEMPLATES[name].template)
    row = []
    for asked, said in turns:
        row += [user(asked), REPLY | {"content": said}]
    examples = built([dialog(*row)], chat, "--prompt", prompt)
    decode = chat.tokenizer.decode
    for e, (_, said) in zip(examples, turns, strict=True):
        teacher = decode(e.teacher_prompt)
        student = decode(e.student_prompt)
        assert teacher.count(prompt.strip()) > student.count(prompt.strip())
        assert decode(e.response).replace("<|end|>", "").strip() == said.strip()
        assert e.response[-1] == 256 and e.response.count(256) == 1
        assert teacher.rpartition("<|assistant|>")[2] == student.rpartition("<|assistant|>")[2]
