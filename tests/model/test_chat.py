"""Chat templates: equal to transformers, and harmless whatever they contain."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from larql_kv.errors import ModelError
from larql_kv.model.catalog import resolve
from larql_kv.model.chat import MAX_TEMPLATE_CHARS, ChatTemplate
from larql_kv.model.gguf_file import GgufFile
from larql_kv.model.tokenizer import Tokenizer

TURNS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n\nthere  "}],
    [
        {"role": "user", "content": "<b>1 & 2</b> {{ 7*7 }} {% raw %}"},
        {"role": "assistant", "content": "  ça va 👩‍👩‍👧 \u00a0"},
        {"role": "user", "content": ""},
    ],
]

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}  # noqa: E501
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""  # noqa: E501
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"""
KITCHEN_SINK = """{%- set ns = namespace(last=0, names=[]) -%}
{%- macro show(m, deep=true) %}[{{ m.role|upper }}:{{ m['content']|default('', true)|replace('a', 'b')|title }}]{% endmacro -%}  # noqa: E501
{% for m in messages|selectattr('role', 'ne', 'system') %}
  {%- set ns.last = ns.last + 1 -%}
  {%- set ns.names = ns.names + [m.role] -%}
  {{ show(m) }}{{ m|tojson }}{{ m|tojson(indent=2) }}
  {{- m.content.split('\n')|map('trim')|join('|') }}{{ m.content.strip().startswith('<') }}
  {%- if loop.index > 5 %}{% break %}{% endif -%}
{% endfor %}
{{ ns.names|unique|sort|join(', ') }} {{ 'x' * 3 ~ 7 // 2 ~ 2 ** 10 ~ '%s-%d' % ('a', 5) }}
{{ '{}:{:>5}'.format('k', 3) }}{{ messages|length }}{{ messages|map(attribute='role')|list }}
{{ [1, [2, (3, 4)], {'a': 'b'}] }}{{ range(3)|list }}{{ 'a\nb\n\nc'|indent(2) }}{{ 'a\nb'|indent(3, true) }}
{% generation %}inside {{ ns.last }}{% endgeneration %}
{% if tools %}tools{% endif %}{{ undefined_thing }}{{ 2.5|round(1)|int }}{{ [3, 1, 2]|sort|first }}{{ [1, 2]|sum }}  # noqa: E501
{% filter upper %}quiet{% endfilter %}{{ messages[-1].content[::-1] }}{{ dict(a=1).items()|list }}"""  # noqa: E501


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    path = resolve("smollm2-135m")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.real
@pytest.mark.parametrize("messages", TURNS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm2_equals_transformers(reference, messages, prompt):
    ours = ChatTemplate.from_tokenizer(Tokenizer.from_gguf(GgufFile.open(resolve("smollm2-135m"))))
    theirs = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert ours.render(messages, prompt) == theirs
    assert "<|im_start|>" in theirs


@pytest.mark.real
@pytest.mark.parametrize("template", [LLAMA3, GEMMA, KITCHEN_SINK], ids=["llama3", "gemma", "kitchen-sink"])
@pytest.mark.parametrize("messages", TURNS)
def test_other_templates_equal_transformers(reference, template, messages):
    theirs = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    ours = ChatTemplate(template, reference.bos_token, reference.eos_token)
    assert ours.render(messages) == theirs


def test_variables_and_missing_tokens():
    template = "{{ bos_token }}{{ extra }}{% if eos_token is defined %}E{% endif %}"
    assert ChatTemplate(template, "<s>").render([], extra="x") == "<s>x"
    assert ChatTemplate(template, None, "</s>").render([]) == "E"


def test_raise_exception_becomes_a_model_error():
    with pytest.raises(ModelError, match="roles must alternate"):
        ChatTemplate(GEMMA, "<bos>").render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize("messages", [[{"content": "x"}], ["text"], [{"role": 3, "content": "x"}], [None]])
def test_bad_messages_are_refused(messages):
    with pytest.raises(ModelError, match="message 0"):
        ChatTemplate(GEMMA).render(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in y %}",
        "{{",
        "{{ 'x'|no_such_filter }}",
        "{% nonsense %}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "]" * 300 + " }}",
        "{% if 1 %}" * 300 + "x" + "{% endif %}" * 300,
        "{{ " + "-" * 20000 + "1 }}",
    ],
    ids=lambda text: text[:20],
)
def test_broken_templates_are_refused(template):
    with pytest.raises(ModelError):
        ChatTemplate(template).render([])


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__.__mro__}'.format(x=1) }}",
    "{{ range.__globals__ }}",
    "{{ (1).__class__.__base__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ dict(a=1).update(b=2) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ environment }}{{ larql_step() }}",
    "{{ joiner.__call__.__func__ }}",
    "{{ [].append.__self__.__class__.__base__ }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_escapes_the_sandbox(template):
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(template).render(messages)
    except ModelError:
        return
    assert messages == [{"role": "user", "content": "x"}]
    # What is undefined prints as nothing: no object of Python's may show.
    assert not any(word in text for word in ("class", "module", "function", "root:", "object at", "uid="))


BOMBS = [
    "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "NS(1, t=1) %}60TIMES{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}END{{ ns.s == ns.t }}",
    "NS(1, t=1) %}60TIMES{% set ns.s = {1: ns.s, 2: ns.s} %}{% set ns.t = {1: ns.t, 2: ns.t} %}END{{ ns.s == ns.t }}",  # noqa: E501
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**10**10 }}",
    "{% set ns = namespace(x=2) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",  # noqa: E501
    "NS('x') %}60TIMES{% set ns.s = ns.s + ns.s %}END{{ ns.s }}",
    "NS('x') %}60TIMES{% set ns.s = ns.s ~ ns.s %}END{{ ns.s }}",
    "NS(['x']) %}60TIMES{% set ns.s = [ns.s, ns.s] %}END{{ ns.s }}",
    "NS({}) %}60TIMES{% set ns.s = {'a': ns.s, 'b': ns.s} %}END{{ ns.s|tojson }}",
    "NS(1) %}60TIMES{% set ns.s = (ns.s, ns.s) %}END{{ ns.s }}",
    "NS(1) %}60TIMES{% set ns.s = dict(a=ns.s, b=ns.s) %}END{{ ns.s }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{% for i in range(10**6) %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('{0}' * 900000).format('x' * 4000000) }}",
    "{{ ('%(a)s' * 900000) % {'a': 'x' * 4000000} }}",
    "{{ 'x'.ljust(10**10) }}{{ 'x'.center(10**10) }}{{ 'x'.zfill(10**10) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ ('x' * 100000).replace('', 'y' * 1000000) }}",
    "{{ ('x' * 100000)|replace('x', 'y' * 1000000) }}",
    "{{ range(99999)|join('y' * 1000000) }}",
    "{{ ('y' * 1000000).join('x' * 1000000) }}",
    "{{ ('x\n' * 1000000)|indent(10**10) }}",
    "{{ [1]|tojson(indent=10**10) }}",
    "{{ range(99999)|map('replace', '', 'x' * 1000000)|list|length }}",
    "{{ range(99999)|map('string')|map('center', 10**6)|list|length }}",
    "{{ range(99999)|select('in', range(99999)|list)|list|length }}",
    "{{ 1.5|round(10**9) }}{{ 1.5|round(10**9, 'ceil') }}",
    "{{ [[range(99999)|list]*99999]|sum(start=[])|length }}",
    "{{ lipsum(10**7) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ ('x' * 4000000)|list|length }}{{ ('ab ' * 1000000).split()|length }}" * 200,
    "{{ ('a<' * 2000000)|striptags|length }}",
    "{{ raise_exception('x' * 4000000) }}",
    "{{ range(99999)|sort(attribute='x.y.z')|list }}" * 400,
    "{% set a = range(99999)|list %}" + "{{ a == (a + [1])[:-1] }}{{ 1.5 in a }}" * 1500,
]

_SHORT = {"60TIMES": "{% for i in range(60) %}", "NS(": "{% set ns = namespace(s=", "END": "{% endfor %}"}
for _short, _long in _SHORT.items():
    BOMBS = [text.replace(_short, _long) for text in BOMBS]


_RUN = """
import resource, sys, time
from larql_kv.errors import ModelError
from larql_kv.model.chat import ChatTemplate
ChatTemplate("{{ 1 }}").render([])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 30), -1))
for index, template in enumerate(eval(sys.stdin.read())):
    start = time.monotonic()
    try:
        size = len(ChatTemplate(template).render([{"role": "user", "content": "x"}]))
        outcome = f"{size} characters"
    except ModelError as error:
        outcome = "refused: " + str(error)[:150]
        if "MemoryError" in outcome:
            outcome = "OUT OF MEMORY " + outcome
    print(index, f"{time.monotonic() - start:.2f}", repr(outcome), flush=True)
"""


def test_bombs_neither_hang_nor_fill_the_memory():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=repr(BOMBS), capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"stopped after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == len(BOMBS)
    print(*lines, f"{time.monotonic() - start:.1f} s", sep="\n")
    assert not [line for line in lines if "OUT OF MEMORY" in line]
    slow = [line for line in lines if float(line.split()[1]) > 4]
    assert not slow


def test_a_bomb_is_refused_and_the_next_rendering_works():
    template = ChatTemplate("{% if messages %}{% for i in range(10**9) %}{% endfor %}{% endif %}fine")
    with pytest.raises(ModelError):
        template.render([{"role": "user", "content": "x"}])
    assert template.render([]) == "fine"


def test_long_conversations_fit():
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 500} for i in range(1001)
    ]
    text = ChatTemplate(GEMMA, "<bos>").render(messages)
    assert text.count("<start_of_turn>") == 1002
    big = [{"role": "user", "content": "x" * 5_000_000}]
    assert len(ChatTemplate(GEMMA, "<bos>").render(big)) > 5_000_000


@pytest.mark.real
def test_base_model_has_no_template():
    from dataclasses import replace

    path = resolve("smollm2-135m")
    tokenizer = replace(Tokenizer.from_gguf(GgufFile.open(path)), chat_template=None)
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate.from_tokenizer(tokenizer)
