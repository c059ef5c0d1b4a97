"""What stands in torch while the facade is installed passes for what stood there before."""

import contextlib
import copy
import functools
import inspect
import pickle
import sys
import types
from typing import Optional

import pytest
import torch
import torch._dynamo
from torch.jit._builtins import _find_builtin
from torch.overrides import TorchFunctionMode, get_overridable_functions

from mindspeed.device.facade import Facade

FACTORIES = {
    "arange": "torch.arange(3)",
    "as_tensor": "torch.as_tensor([1.0])",
    "empty": "torch.empty([2]).zero_()",
    "empty_like": "torch.empty_like(x).zero_()",
    "empty_strided": "torch.empty_strided([2], [1]).zero_()",
    "eye": "torch.eye(2)",
    "full": "torch.full([2], 1.0)",
    "full_like": "torch.full_like(x, 1.0)",
    "linspace": "torch.linspace(0, 1, 3)",
    "logspace": "torch.logspace(0, 1, 3)",
    "normal": "torch.normal(0.0, 1.0, [2])",
    "ones": "torch.ones([2])",
    "ones_like": "torch.ones_like(x)",
    "rand": "torch.rand([2])",
    "rand_like": "torch.rand_like(x)",
    "randint": "torch.randint(0, 9, [2])",
    "randint_like": "torch.randint_like(x, 9)",
    "randn": "torch.randn([2])",
    "randn_like": "torch.randn_like(x)",
    "randperm": "torch.randperm(3)",
    "scalar_tensor": "torch.scalar_tensor(1.0)",
    "tensor": "torch.tensor([1.0])",
    "tril_indices": "torch.tril_indices(2, 2)",
    "triu_indices": "torch.triu_indices(2, 2)",
    "zeros": "torch.zeros([2], device=torch.device('cpu'))",
    "zeros_like": "torch.zeros_like(x, device=torch.device('cpu'))",
    "Tensor.new_empty": "x.new_empty([2]).zero_()",
    "Tensor.new_empty_strided": "x.new_empty_strided([2], [1]).zero_()",
    "Tensor.new_full": "x.new_full([2], 1.0)",
    "Tensor.new_ones": "x.new_ones([2])",
    "Tensor.new_zeros": "x.new_zeros([2])",
    "Tensor.to": "x.to(torch.device('cpu')).to(torch.float64)",
    "Tensor.cpu": "x.cpu()",
    "Tensor.type": "x.type(torch.float64)",
}
NOT_IN_SCRIPT = {
    "asarray": "torch.asarray([1.0])",
    "Tensor.new_tensor": "x.new_tensor([1.0])",
}
CALLS = FACTORIES | NOT_IN_SCRIPT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file with one function a call: the compilers read the source."""
    path = tmp_path_factory.mktemp("source") / "calls.py"
    text = "import torch\n"
    for name, call in CALLS.items():
        text += f"def {name.replace('.', '_')}(x: torch.Tensor):\n    return {call}\n"
    path.write_text(text)
    sys.modules["calls"] = module = types.ModuleType("calls")
    exec(compile(text, str(path), "exec"), vars(module))
    yield module
    del sys.modules["calls"]


def standing(cpu):
    """List what the facade puts into torch: owner, name and what stood there."""
    with Facade(cpu) as facade:
        undo = [each for each in facade._undo if str(each[0]).find("mindspeed") < 0]
        return [(owner, name, old, getattr(owner, name)) for owner, name, old in undo]


def drawn(function):
    torch.manual_seed(3)
    made = function(torch.ones(2))
    return made if isinstance(made, (list, tuple)) else [made]


def test_the_calls_are_all_factories_that_the_facade_replaces(cpu):
    owners = {torch: "", torch.Tensor: "Tensor."}
    replaced = {owners[owner] + name for owner, name, *_ in standing(cpu) if owner in owners}
    others = {"Generator", "device", "load", "set_default_device", "compile"}
    others |= {"is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype"}
    methods = {"cuda", "pin_memory", "is_cuda", "record_stream"}  # that a plain cpu cannot call
    assert replaced == set(CALLS) | others | {f"Tensor.{each}" for each in methods}


@pytest.mark.parametrize("name", FACTORIES)
def test_the_script_compiler_accepts_every_factory(facade, source, name):
    function = getattr(source, name.replace(".", "_"))
    scripted = torch.jit.script(function)
    for one, other in zip(drawn(scripted), drawn(function), strict=True):
        assert torch.equal(one, other)


def test_the_script_compiler_knows_what_it_knew(cpu):
    known = {}
    for owner, name, old, _ in standing(cpu):
        builtin = _find_builtin(old)
        if builtin is not None:
            known[owner, name] = builtin
    table = len(torch.jit._builtins._builtin_table)
    with Facade(cpu):
        assert {place: _find_builtin(getattr(*place)) for place in known} == known
    assert len(torch.jit._builtins._builtin_table) == table
    assert known[torch, "empty_like"] == "aten::empty_like"


def annotated(x: torch.Tensor, device: Optional[torch.device] = None):  # noqa: UP045
    return torch.zeros_like(x, device=device)


def test_annotations_made_before_the_facade_can_be_scripted(facade):
    scripted = torch.jit.script(annotated)
    assert torch.equal(scripted(torch.ones(2), torch.device("cpu")), torch.zeros(2))


@pytest.mark.parametrize("how", ["compile", "export", "symbolic_trace"])
def test_the_tracers_accept_every_factory(facade, source, how):
    class Model(torch.nn.Module):
        def forward(self, x):
            functions = [getattr(source, name.replace(".", "_")) for name in CALLS]
            return [function(x) for function in functions]

    torch._dynamo.reset()
    if how == "compile":
        traced = torch.compile(Model(), fullgraph=True, backend="eager")
    elif how == "export":
        traced = torch.export.export(Model(), (torch.ones(2),)).module()
    else:
        traced = torch.fx.symbolic_trace(Model())
    results = drawn(traced)
    if how == "symbolic_trace":  # what depends on no input was drawn once, at the trace
        results = [each for each in results if isinstance(each, torch.Tensor)]
        assert len(results) == len(CALLS)
        return
    for name, one, other in zip(CALLS, results, drawn(Model()), strict=True):
        assert torch.equal(one, other), name


def test_a_compiled_function_hears_what_it_hears_uncompiled(facade):
    def answers(x):
        device = torch.device("cuda", 1)
        available = torch.cuda.is_available() and isinstance(device, torch.device)
        return x + (1 if device.type == "cpu" else 2) + (10 if available else 20)

    torch._dynamo.reset()
    compiled = torch.compile(answers, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(1)), answers(torch.zeros(1)))


def test_a_default_device_reaches_compiled_functions_and_older_copies(facade):
    older = inspect.unwrap(torch.empty)
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # tests before this one fill it without this facade
    compiled = torch.compile(lambda: torch.ones(2) + 1, fullgraph=True, backend="eager")
    with torch.device("meta"):
        made = [torch.empty(2), older(2), torch.tensor([1.0]), torch.arange(2), compiled()]
        likeness = torch.zeros_like(torch.empty(1, device="cpu"))
    assert [each.device.type for each in made] == ["meta"] * 5
    assert likeness.device.type == "cpu"


def test_functions_can_be_pickled_and_copied_as_before(cpu):
    before = []
    for owner, name, old, _ in standing(cpu):
        if callable(old) and isinstance(owner, (type, types.ModuleType)):
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                pickle.dumps(old)
                before.append((owner, name))
    assert {(torch, "empty_like"), (torch.Tensor, "to"), (torch.cuda, "is_available")} < set(before)
    with Facade(cpu):
        for owner, name in before:
            new = getattr(owner, name)
            assert pickle.loads(pickle.dumps(new)) is new and copy.deepcopy(new) is new, name
        pickled = pickle.dumps([torch.zeros_like, torch.device, torch.Tensor.to])
    assert pickle.loads(pickled) == [torch.zeros_like, torch.device, torch.Tensor.to]


def test_signatures_are_those_of_torch(cpu):
    def parameters(function):
        with contextlib.suppress(ValueError, TypeError):
            return list(inspect.signature(function).parameters)

    places = [each for each in standing(cpu) if each[0] in (torch, torch.Tensor, torch.nn.Module)]
    with Facade(cpu):
        for owner, name, old, _ in places:
            if parameters(old) is not None and not isinstance(old, type):
                assert parameters(getattr(owner, name)) == parameters(old), name


def overridable():
    """Name the functions that may be overridden, as torch.overrides lists them."""
    return {
        (getattr(space, "__name__", ""), getattr(function, "__name__", ""))
        for space, functions in get_overridable_functions().items()
        for function in functions
    }


def test_the_overridable_functions_are_those_of_torch(cpu):
    plain = overridable()
    with Facade(cpu):
        assert overridable() == plain
        assert torch.overrides.is_tensor_method_or_property(torch.Tensor.to)
        assert torch.overrides.resolve_name(torch.empty_like) == "torch.empty_like"
    assert overridable() == plain


def test_subclasses_and_modes_are_given_what_stands_in_torch(facade):
    class Handled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function in (torch.zeros_like, torch.Tensor.to):
                return function.__name__
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(2).as_subclass(Handled)
    assert torch.zeros_like(tensor) == "zeros_like" and tensor.to("cuda") == "to"
    assert isinstance(torch.ones_like(tensor), Handled)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.empty, torch.empty_like):
                return function.__name__
            return function(*args, **(kwargs or {}))

    with Mode():
        assert torch.empty(2, device="cuda") == "empty" and torch.ones(1, device="cuda") == 1
        assert torch.empty_like(torch.ones(1)) == "empty_like"


def test_classes_of_torch_are_found_by_type(cpu):
    original = inspect.getattr_static(torch, "device")
    device = torch.device("cpu")
    older = {original: "device"}
    with Facade(cpu):
        assert older[torch.device] == {torch.device: "device"}[type(device)] == "device"
        assert torch.device == original and issubclass(type(device), torch.device)

        @functools.singledispatch
        def kind(value):
            return "other"

        kind.register(type(device), lambda value: "device")
        assert kind(torch.device("cuda")) == "device"
        with Facade(cpu):
            assert torch.device == original and older[torch.device] == "device"
        assert pickle.loads(pickle.dumps(torch.Generator)) is torch.Generator
