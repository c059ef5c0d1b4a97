"""The table: what is put into which file, and every command that reads that file."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.security import files
from tests.security.pickles import TECHNIQUES

Poison = Callable[[str], object]
"""Changes the inputs in the current folder; its argument is the canary."""

MCORE = ("convert mcore", "convert mcore layout", "posttrain mcore", "generate mcore")
SAVED = ("convert saved", "posttrain saved", "posttrain resume", "posttrain finetune")
SAVED += ("pretrain saved", "generate saved")
MM_SAVED = ("mm resume", "mm load", "mm convert dcp")
LORA = ("export-lora", "export-lora merge")
HF = ("convert hf", "posttrain hf", "pretrain hf", "generate hf", "chat")
MM_HF = ("mm convert hf", "mm train")
TOKENIZER = ("preprocess", "preprocess qwen")
HF_TOKENIZER = ("generate prompts", "chat", "posttrain raw")
TOKENS = ("posttrain hf", "show-batch")
DOCUMENTS = ("pretrain hf", "merge")
YAML = ("preprocess yaml", "convert yaml", "posttrain yaml", "pretrain yaml", "generate yaml")
YAML += ("chat yaml", "mm convert yaml", "mm train", "mm plan", "report", "enable")
BODY = "reduce os.system"
"""The technique that every command gets to see; the others go to one command a file."""
SOME = (BODY, "build", "dataclass of torch's modules", "nested torch._load_from_bytes")
ALL = tuple(TECHNIQUES)


@dataclass(frozen=True)
class Payload:
    """A change to one input."""

    name: str
    changed: tuple[str, ...]
    """The inputs that are changed, and so copied."""
    said: str
    """What the error has to name: the file, or the folder that was given where it is one of many
    that transformers reads."""
    commands: tuple[str, ...]
    poison: Poison
    is_harmless: bool = False
    """Whether the command may do its work: what was put there has no meaning to it."""


@dataclass(frozen=True)
class Place:
    """A file that holds a pickle."""

    name: str
    changed: tuple[str, ...]
    said: str
    commands: tuple[str, ...]
    put: Callable[[bytes], object]
    techniques: tuple[str, ...] = SOME
    is_harmless: bool = False


PLACES = (
    Place(
        "a rank's .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda body: files.put_into_archive(files.RANK_FILE, body),
        ALL,
    ),
    Place(
        "an old .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda body: files.put_in_place_of(str(files.RANK_FILE), body),
    ),
    Place("pytorch_model.bin", ("hf",), "pytorch_model.bin", HF, files.put_into_hf),
    Place("pytorch_model.bin of mm", ("mm",), "pytorch_model.bin", MM_HF, files.put_into_hf),
    Place(
        "common.pt",
        ("saved",),
        "common.pt",
        SAVED[1:3],
        lambda body: files.put_into_archive(files.NEWEST / "common.pt", body),
    ),
    Place(
        ".metadata",
        ("saved",),
        ".metadata",
        SAVED,
        lambda body: files.put_into_metadata(files.NEWEST, body),
        ALL,
    ),
    Place(
        ".metadata of adapters",
        ("lora",),
        ".metadata",
        LORA,
        lambda body: files.put_into_metadata(Path("lora/iter_0000001"), body),
    ),
    Place(
        ".metadata of mm",
        ("mmsaved",),
        ".metadata",
        MM_SAVED,
        lambda body: files.put_into_metadata(files.MM_NEWEST, body),
    ),
    Place(
        "a byte entry",
        ("saved",),
        "iter_0000002",
        SAVED[1:3],
        lambda body: files.put_into_bytes(files.NEWEST, body),
        ALL,
    ),
    Place(
        "a byte entry that is not needed",
        ("saved",),
        "iter_0000002",
        (SAVED[0], *SAVED[3:]),
        lambda body: files.put_into_bytes(files.NEWEST, body),
        is_harmless=True,
    ),
    Place(
        "a byte entry of mm",
        ("mmsaved",),
        "iter_0000002",
        MM_SAVED,
        lambda body: files.put_into_bytes(files.MM_NEWEST, body),
    ),
    Place(
        "a tensor entry",
        ("saved",),
        "iter_0000002",
        SAVED,
        lambda body: files.put_into_tensor(files.NEWEST, body),
    ),
    Place(
        "a tensor entry of mm",
        ("mmsaved",),
        "iter_0000002",
        MM_SAVED,
        lambda body: files.put_into_tensor(files.MM_NEWEST, body),
    ),
)


def pickles() -> Iterator[Payload]:
    """Yield every technique in every file that is a pickle."""
    for place in PLACES:
        for technique in place.techniques:
            code = TECHNIQUES[technique]
            commands = place.commands if technique == BODY else place.commands[:1]

            def poison(
                canary: str, place: Place = place, code: Callable[..., bytes] = code
            ) -> None:
                place.put(code(canary))

            name = f"{technique} in {place.name}"
            more = place.is_harmless
            yield Payload(name, place.changed, place.said, commands, poison, more)


def _body(canary: str) -> bytes:
    return TECHNIQUES[BODY](canary)


def _in_place(path: str) -> Poison:
    return lambda canary: files.put_in_place_of(path, _body(canary))


def _objects(path: str) -> Poison:
    return lambda canary: files.array_of_objects(path, _body(canary))


SFT = ("sft/data_packed_input_ids_document.idx", "sft/data_packed_labels_document.bin")
TEXT = "docs/data_text_document.idx"
FOREIGN = (
    Payload("a pickle as .idx", ("sft",), ".idx", TOKENS, _in_place(SFT[0])),
    Payload("an .npy of objects as .idx", ("sft",), ".idx", TOKENS, _objects(SFT[0])),
    Payload("a pickle as .bin", ("sft",), "labels_document", TOKENS, _in_place(SFT[1])),
    Payload("a pickle as .idx of documents", ("docs",), ".idx", DOCUMENTS, _in_place(TEXT)),
    Payload("an .npy of objects as documents", ("docs",), ".idx", DOCUMENTS, _objects(TEXT)),
    Payload(
        "a pickle as safetensors",
        ("hf",),
        "model.safetensors",
        HF,
        _in_place("hf/model.safetensors"),
    ),
    Payload(
        "a pickle as safetensors of mm",
        ("mm",),
        "model.safetensors",
        MM_HF,
        _in_place("mm/model/model.safetensors"),
    ),
    Payload(
        "a pickle as adapters",
        ("peft",),
        "adapter_model",
        ("posttrain lora",),
        _in_place("peft/adapter_model.safetensors"),
    ),
    Payload(
        "a pickle as GGUF",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _in_place("gguf/model.gguf"),
    ),
    Payload(
        "a pickle as tokenizer.json",
        ("tokenizer",),
        "tokenizer",
        TOKENIZER,
        _in_place("tokenizer/tokenizer.json"),
    ),
    Payload(
        "a pickle as training.json",
        ("saved",),
        "training.json",
        SAVED[1:3],
        _in_place("saved/iter_0000002/training.json"),
    ),
    Payload(
        "a pickle as tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], *SAVED[2:]),
        _in_place("saved/latest_checkpointed_iteration.txt"),
    ),
    Payload("a pickle as log", ("saved",), "log.jsonl", ("plot",), _in_place("saved/log.jsonl")),
    Payload(
        "a pickle as records",
        ("raw",),
        "good.jsonl",
        ("preprocess", "posttrain raw"),
        _in_place("raw/good.jsonl"),
    ),
    Payload(
        "a pickle as prompts",
        ("raw",),
        "prompts.jsonl",
        ("generate prompts",),
        _in_place("raw/prompts.jsonl"),
    ),
    Payload(
        "a pickle as templates",
        ("raw",),
        "templates.json",
        ("preprocess template file",),
        _in_place("raw/templates.json"),
    ),
    Payload("a pickle as an image", ("mm",), ".png", ("mm train",), _in_place("mm/1.png")),
)


def _cached(pattern: str, put: Callable[[str, bytes], object]) -> Poison:
    def poison(canary: str) -> None:
        for path in Path("cache").glob(pattern):
            put(str(path), _body(canary))

    return poison


CACHES = (
    Payload(
        "a pickle as remembered tokenizer",
        ("cache",),
        "",
        ("preprocess",),
        _cached("tokenizers/*.json", files.put_in_place_of),
        is_harmless=True,
    ),
    Payload(
        "a pickle as tokens kept from before",
        ("cache",),
        ".idx",
        ("posttrain raw",),
        _cached("data/*/*input_ids*.idx", files.put_in_place_of),
    ),
    Payload(
        "objects as tokens kept from before",
        ("cache",),
        ".idx",
        ("posttrain raw",),
        _cached("data/*/*input_ids*.idx", files.array_of_objects),
    ),
    Payload(
        "a pickle as summary kept from before",
        ("cache",),
        "summary.json",
        ("posttrain raw",),
        _cached("data/*/*summary.json", files.put_in_place_of),
        is_harmless=True,
    ),
)


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


YAMLS = {
    "python/object/apply": "a: !!python/object/apply:os.system ['touch CANARY']\n",
    "python/object/new": "a: !!python/object/new:os.system ['touch CANARY']\n",
    "python/name": "a: !!python/name:os.system\n",
    "python/module": "a: !!python/module:os\n",
    "a tag in a key": "!!python/object/apply:os.system ['touch CANARY']: 1\n",
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "nested lists": "a: " + "[" * 20000 + "]" * 20000 + "\n",
    "nested keys": "a: " + "{b: " * 5000 + "1" + "}" * 5000 + "\n",
    "a list as a key": "? [1, 2]\n: 1\n",
}


def yamls() -> Iterator[Payload]:
    """Yield YAML files with tags that make objects, and bombs."""
    for name, content in YAMLS.items():

        def poison(canary: str, content: str = content) -> None:
            for path in [*Path("yaml").glob("*.yaml"), Path("mm/run.yaml")]:
                path.write_text(content.replace("CANARY", canary))

        commands = YAML if name == "python/object/apply" else ("convert yaml", "mm train", "enable")
        yield Payload(f"YAML: {name}", ("yaml", "mm"), ".yaml", commands, poison)


DEEP = "[" * 200_000
JSONS = {
    "hf/config.json": ("hf", ("convert hf", "generate hf")),
    "hf/tokenizer_config.json": ("hf", ("generate prompts",)),
    "tokenizer/tokenizer.json": ("tokenizer", ("preprocess",)),
    "mm/model/config.json": ("config.json", ("mm convert hf", "mm plan", "mm train")),
    "mm/model/processor_config.json": ("mm/model", ("mm train",)),
    "mm/data.json": ("data.json", ("mm train",)),
    "raw/good.jsonl": ("good.jsonl", ("preprocess", "posttrain raw")),
    "raw/prompts.jsonl": ("prompts.jsonl", ("generate prompts",)),
    "raw/templates.json": ("templates.json", ("preprocess template file",)),
    "saved/log.jsonl": ("log.jsonl", ("plot",)),
    "saved/iter_0000002/training.json": ("training.json", SAVED[1:3]),
    "saved/iter_0000002/metadata.json": ("metadata.json", SAVED[1:3]),
    "mmsaved/iter_0000002/training.json": ("training.json", MM_SAVED[:2]),
    "sft/data.summary.json": ("summary.json", ("show-batch",)),
    "lora/iter_0000001/adapter_config.json": ("adapter_config.json", LORA),
}


def jsons() -> Iterator[Payload]:
    """Yield JSON nested so deeply that a parser may fall over, and numbers without end."""
    for path, (said, commands) in JSONS.items():
        for name, content in (("nested", DEEP), ("digits", '{"a": ' + "9" * 5000 + "}")):

            def poison(canary: str, path: str = path, content: str = content) -> None:
                Path(path).write_text(content)

            top = path.partition("/")[0]
            yield Payload(
                f"JSON: {name} in {path}",
                (top,),
                said,
                commands,
                poison,
                is_harmless=name == "digits",
            )


def _overlap(header: dict[str, dict[str, list[int]]]) -> None:
    names = [name for name in header if name != "__metadata__"]
    same = [one for one in names if header[one]["shape"] == header[names[0]]["shape"]]
    header[same[-1]]["data_offsets"] = header[names[0]]["data_offsets"]
    if len(same) == 1:
        header[names[0]]["data_offsets"] = [0, header[names[0]]["data_offsets"][1]]


def _first(header: dict[str, dict[str, object]]) -> dict[str, object]:
    return header[next(name for name in header if name != "__metadata__")]


def _safetensors(**how: object) -> Callable[[str], Poison]:
    return lambda path: (
        lambda canary: files.safetensors(
            path,
            how.get("edit"),
            **{  # type: ignore[arg-type]
                key: value for key, value in how.items() if key != "edit"
            },
        )
    )


HEADERS = {
    "a huge header": _safetensors(length=1 << 62),
    "a header beyond the file": _safetensors(length=1 << 30),
    "overlapping tensors": _safetensors(edit=_overlap),
    "negative offsets": _safetensors(edit=lambda h: _first(h).update(data_offsets=[-8, 0])),
    "an endless shape": _safetensors(edit=lambda h: _first(h).update(shape=[1 << 40, 1 << 40])),
    "a shape that wraps to 0": _safetensors(edit=lambda h: _first(h).update(shape=[1 << 32] * 2)),
    "an unknown type": _safetensors(edit=lambda h: _first(h).update(dtype="OBJECT")),
    "nested header": _safetensors(header=b"[" * 100_000),
    "duplicate keys": _safetensors(
        header=b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    ),
}


def headers() -> Iterator[Payload]:
    """Yield safetensors files whose header lies."""
    for name, make in HEADERS.items():
        yield Payload(
            f"safetensors: {name}",
            ("hf",),
            "model.safetensors",
            ("convert hf", "posttrain hf", "generate hf"),
            make("hf/model.safetensors"),
        )
        yield Payload(
            f"safetensors of mm: {name}",
            ("mm",),
            "model.safetensors",
            MM_HF,
            make("mm/model/model.safetensors"),
        )
        yield Payload(
            f"adapters: {name}",
            ("peft",),
            "adapter_model.safetensors",
            ("posttrain lora",),
            make("peft/adapter_model.safetensors"),
        )


def _index(folder: str) -> Poison:
    def poison(canary: str) -> None:
        way = files.copy_outside(f"{folder}/model.safetensors")
        path = Path(folder, "model.safetensors.index.json")
        path.write_text(f'{{"weight_map": {{"x": "{way}"}}}}')

    return poison


def _outside_metadata(folder: Path) -> Poison:
    def poison(canary: str) -> None:
        import pickle

        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            source = folder / info.relative_path
            if source.exists():
                files.copy_outside(str(source))
            info.relative_path = f"../outside-{source.name}"
        path.write_bytes(pickle.dumps(metadata))

    return poison


def _tracker(root: str, text: str) -> Poison:
    def poison(canary: str) -> None:
        os.rename(f"{root}/iter_0000002", "outside")
        Path(root, "latest_checkpointed_iteration.txt").write_text(text)

    return poison


def _gguf(place: int, content: bytes) -> Poison:
    def poison(canary: str) -> None:
        path = Path("gguf/model.gguf")
        found = bytearray(path.read_bytes())
        found[place : place + len(content)] = content
        path.write_bytes(found)

    return poison


def _arrow(canary: str) -> None:
    """A parquet file with a column of a type that pyarrow used to unpickle."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    kind[b"ARROW:extension:metadata"] = files.stream(_body(canary))
    fields = [pa.field("prompt", pa.string(), metadata=kind), pa.field("response", pa.string())]
    table = pa.table([["a"], ["b"]], schema=pa.schema(fields))
    Path("raw/good.jsonl").unlink()
    pq.write_table(table, "raw/good.jsonl.parquet")
    os.rename("raw/good.jsonl.parquet", "raw/good.parquet")


PATHS = (
    Payload("../ in an index", ("hf",), "model.safetensors.index.json", HF, _index("hf")),
    Payload(
        "../ in an index of mm", ("mm",), "model.safetensors.index.json", MM_HF, _index("mm/model")
    ),
    Payload("../ in .metadata", ("saved",), ".metadata", SAVED, _outside_metadata(files.NEWEST)),
    Payload(
        "../ in .metadata of mm",
        ("mmsaved",),
        ".metadata",
        MM_SAVED,
        _outside_metadata(files.MM_NEWEST),
    ),
    Payload(
        "../ in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "../outside"),
    ),
    Payload(
        "odd digits in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "²"),
    ),
    Payload(
        "digits without end in the tracker",
        ("saved",),
        "latest_checkpointed_iteration.txt",
        (SAVED[0], SAVED[2], SAVED[5]),
        _tracker("saved", "9" * 5000),
    ),
    Payload(
        "../ in the tracker of mm",
        ("mmsaved",),
        "latest_checkpointed_iteration.txt",
        ("mm resume", "mm convert dcp"),
        _tracker("mmsaved", "../outside"),
    ),
    Payload(
        "a zip bomb as .pt",
        ("mcore",),
        "model_optim_rng.pt",
        MCORE,
        lambda canary: files.zip_bomb(files.RANK_FILE),
    ),
    Payload(
        "a zip bomb as common.pt",
        ("saved",),
        "common.pt",
        SAVED[1:3],
        lambda canary: files.zip_bomb(files.NEWEST / "common.pt"),
    ),
    Payload(
        "an image bomb",
        ("mm",),
        "1.png",
        ("mm train",),
        lambda canary: files.image_bomb("mm/1.png"),
    ),
    Payload(
        "GGUF: tensors without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(8, b"\xff" * 7),
    ),
    Payload(
        "GGUF: keys without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(16, b"\xff" * 7),
    ),
    Payload(
        "GGUF: a name without end",
        ("gguf",),
        "model.gguf",
        ("import-gguf", "preprocess gguf"),
        _gguf(24, b"\xff" * 7),
    ),
    Payload(
        "a pickled type in parquet", ("raw",), "", ("preprocess parquet",), _arrow, is_harmless=True
    ),
)


def all_payloads() -> list[Payload]:
    """Return the table."""
    single = (*FOREIGN, *CACHES, *CODE, *PATHS)
    return [*single, *pickles(), *templates(), *yamls(), *jsons(), *headers()]
