"""Chat templates of others: what ordinary ones do is let through, what has no end is refused."""

import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mindspeed_llm.data.template_sandbox import BoundedEnvironment, BudgetExceeded

MESSAGES = [
    {"role": "user", "content": "a * b % c, 12345678"},
    {"role": "tool", "content": "x" * 99},
]
ORDINARY = (
    "{% for m in messages %}{{ '** %s **' % m.content }}{{ ' ' if loop.last }}{% endfor %}",
    "{{ '{:>10}|{:<4}'.format(messages[0].role, 12345678) }}",
    "{% macro say(m) %}{{ m.role ~ ': ' ~ m.content }}{% endmacro %}{{ say(messages[1]) }}",
    "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m.role %}{% endfor %}"
    "{{ n.x|upper|replace('USER', 'Human') }}",
    "{{ messages|tojson(indent=4) }}{{ messages|map(attribute='role')|join(', ') }}",
    "{{ messages[0].content.split(' ')|length }}{{ ('-' * 20).join(['a', 'b']) }}",
    "{% for i in range(3) recursive %}{{ i }}{% if i > 1 %}{{ loop([0]) }}{% endif %}{% endfor %}",
    "{{ 'a\nb'|indent(2) }}{{ 'abc'.replace('b', 'ccc') }}{{ 2 ** 10 + 3 % 2 }}{{ [1] + [2] }}",
)


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_give_what_jinja_gives(source):
    plain = ImmutableSandboxedEnvironment().from_string(source).render(messages=MESSAGES)
    assert BoundedEnvironment().from_string(source).render(messages=MESSAGES) == plain


def test_every_rendering_has_a_budget_of_its_own():
    template = BoundedEnvironment().from_string("{% for i in range(99999) %}{% endfor %}")
    for _ in range(30):
        template.render()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in range(999) %}{% set x = range(99999)|list %}{% endfor %}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:>{w}}'.format(1, w=10 ** 9) }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 99999) }}",
    ],
)
def test_unbounded_work_is_refused_soon(source):
    started = time.process_time()
    with pytest.raises((BudgetExceeded, RecursionError)):
        BoundedEnvironment().from_string(source).render()
    assert time.process_time() - started < 10
