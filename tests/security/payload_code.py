"""Code that a model brings along, and chat templates that want out of their sandbox."""

from collections.abc import Iterator
from pathlib import Path

from tests.security import files
from tests.security.payload import HF, HF_TOKENIZER, MCORE, MM_HF, SAVED, TOKENIZER, Payload, Poison


def _auto_map(folder: str, file: str, **values: object) -> Poison:
    def poison(canary: str) -> None:
        files.module(folder, canary)
        path = Path(folder, file)
        if not path.exists():
            path.write_text("{}")
        files.change(str(path), lambda found: found.update(values))

    return poison


AUTO = {
    "AutoConfig": "evil.Evil",
    "AutoModelForCausalLM": "evil.Evil",
    "AutoModel": "evil.Evil",
    "AutoModelForImageTextToText": "evil.Evil",
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    "AutoProcessor": "evil.Evil",
    "AutoImageProcessor": "evil.Evil",
    "AutoVideoProcessor": "evil.Evil",
}
CODE = (
    Payload(
        "auto_map of a known model",
        ("hf",),
        "",
        HF,
        _auto_map("hf", "config.json", auto_map=AUTO),
        is_harmless=True,
    ),
    Payload(
        "auto_map of an unknown model",
        ("hf",),
        "config.json",
        HF,
        _auto_map("hf", "config.json", auto_map=AUTO, model_type="evil", architectures=["Evil"]),
    ),
    Payload(
        "auto_map of a known model of mm",
        ("mm",),
        "",
        (*MM_HF, "mm plan"),
        _auto_map("mm/model", "config.json", auto_map=AUTO),
        is_harmless=True,
    ),
    Payload(
        "auto_map of an unknown model of mm",
        ("mm",),
        "mm/model",
        (*MM_HF, "mm plan"),
        _auto_map(
            "mm/model", "config.json", auto_map=AUTO, model_type="evil", architectures=["Evil"]
        ),
    ),
    Payload(
        "auto_map of a tokenizer",
        ("tokenizer",),
        "tokenizer",
        TOKENIZER,
        _auto_map("tokenizer", "tokenizer_config.json", auto_map=AUTO, tokenizer_class="Evil"),
        is_harmless=True,
    ),
    Payload(
        "auto_map of a model's tokenizer",
        ("hf",),
        "hf",
        HF_TOKENIZER,
        _auto_map("hf", "tokenizer_config.json", auto_map=AUTO, tokenizer_class="Evil"),
        is_harmless=True,
    ),
    Payload(
        "auto_map of a processor",
        ("mm",),
        "mm/model",
        ("mm train",),
        _auto_map("mm/model", "processor_config.json", auto_map=AUTO, processor_class="Evil"),
    ),
    Payload(
        "auto_map of an image processor",
        ("mm",),
        "mm/model",
        ("mm train",),
        _auto_map(
            "mm/model", "preprocessor_config.json", auto_map=AUTO, image_processor_type="Evil"
        ),
        is_harmless=True,
    ),
    Payload(
        "a way of generating",
        ("hf",),
        "",
        ("generate hf", "chat"),
        _auto_map("hf", "generation_config.json", custom_generate="."),
        is_harmless=True,
    ),
    Payload(
        "a TorchScript program",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda canary: files.torchscript(files.RANK_FILE, canary),
    ),
    Payload(
        "a TorchScript program as common.pt",
        ("saved",),
        "common.pt",
        SAVED[1:3],
        lambda canary: files.torchscript(files.NEWEST / "common.pt", canary),
    ),
    Payload(
        "PostScript as an image",
        ("mm",),
        "1.png",
        ("mm train",),
        lambda canary: files.postscript("mm/1.png", canary),
    ),
)


def _template(folder: str, source: str) -> Poison:
    def poison(canary: str) -> None:
        Path(folder, "chat_template.jinja").write_text(source.replace("CANARY", canary))

    return poison


ESCAPES = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ (''|attr('__class__')).__mro__[1].__subclasses__()|length }}",
    "globals": "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "a helper": "{{ strftime_now.__globals__['json'].codecs.builtins.open('CANARY', 'w') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "a frame": "{% for x in (1, 2)|map('string') %}{{ x.gi_frame.f_builtins }}{% endfor %}"
    "{{ raise_exception.__code__.co_consts }}",
    "import": "{% import '/etc/passwd' as x %}{{ x }}",
    "changing a message": "{{ messages.append(messages[0].__class__) }}",
}
BOMBS = {
    "range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "text times a number": "{{ 'a' * 10**10 }}",
    "a list times a number": "{{ ([0] * 10**9)|length }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "powers in turn": "{% set n = namespace(x=7) %}{% for i in range(60) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "text joined to itself": "{% set n = namespace(x='a') %}{% for i in range(40) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}",
    "text added to itself": "{% set n = namespace(x='a') %}{% for i in range(40) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x|length }}",
    "lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "JSON of lists in lists": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
    "a wide text": "{{ 'a'.center(10**10) }}",
    "a wide filter": "{{ 'a'|center(10**10) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format call": "{{ '{:>10000000000}'.format(1) }}",
    "replaced": "{{ ('a' * 99999).replace('a', 'b' * 999999)|length }}",
    "joined": "{{ (['a' * 99999] * 999999)|join|length }}",
    "batches": "{{ [1]|batch(10**10, 0)|list|length }}",
    "words": "{{ lipsum(n=10**8)|length }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "indented": "{{ ('\n' * 99999)|indent(99999)|length }}",
}


def templates() -> Iterator[Payload]:
    """Yield chat templates that want out of their sandbox, or take all time or memory."""
    for name, source in {**ESCAPES, **BOMBS}.items():
        first, other = _template("tokenizer", source), _template("hf", source)
        yield Payload(f"template: {name}", ("tokenizer",), "chat template", ("preprocess",), first)
        if name in ("a helper", "range", "nested ranges"):
            yield Payload(
                f"template of a model: {name}",
                ("hf",),
                "chat template",
                ("posttrain raw", "chat"),
                other,
            )
            yield Payload(
                f"template of mm: {name}",
                ("mm",),
                "chat template",
                ("mm train",),
                _template("mm/model", source),
            )
