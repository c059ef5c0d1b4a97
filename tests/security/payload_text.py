"""YAML files with tags and bombs, and JSON that is nested or long without end."""

from collections.abc import Iterator
from pathlib import Path

from tests.security.payload import LORA, MM_SAVED, SAVED, YAML, Payload

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
    for path, (named, commands) in JSONS.items():
        for name, content in (("nested", DEEP), ("digits", '{"a": ' + "9" * 5000 + "}")):

            def poison(canary: str, path: str = path, content: str = content) -> None:
                Path(path).write_text(content)

            top = path.partition("/")[0]
            yield Payload(
                f"JSON: {name} in {path}",
                (top,),
                named,
                commands,
                poison,
                is_harmless=name == "digits",
            )
