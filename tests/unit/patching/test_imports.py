"""A patch waits for its module and is there before anybody sees the module."""

import importlib
import sys
import threading

import pytest

from mindspeed.patching import Patch, Patcher, PatchError
from mindspeed.patching.imports import ImportHook

LIB = """
    seen = []
    def work(x):
        return "old"
    table = {"work": work}
    seen.append(work(0))
"""


def hooks():
    return [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]


def _new(x):
    return "new"


@pytest.fixture
def lib(write):
    write(lib__deep__mod=LIB)


def states(patcher):
    return [record.state for record in patcher.report()]


def test_waits_then_applies_and_the_hook_goes_away(lib, patcher):
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", _new)])
    assert states(patcher) == ["waiting"] and len(hooks()) == 1
    assert "lib" not in sys.modules
    from lib.deep.mod import table, work

    assert work is table["work"] is _new
    assert sys.modules["lib.deep.mod"].seen == ["old"]  # the body itself ran unpatched
    assert states(patcher) == ["applied"] and not hooks()
    assert patcher.report()[0].copies == 1
    patcher.revert()
    assert sys.modules["lib.deep.mod"].work(0) == table["work"](0) == "old"


@pytest.mark.parametrize(
    "statement",
    [
        "import lib.deep.mod as m; f = m.work",
        "import lib.deep.mod; f = lib.deep.mod.work",
        "from lib.deep import mod; f = mod.work",
        "from lib.deep.mod import work as f",
        "import importlib; f = importlib.import_module('lib.deep.mod').work",
        "import importlib; f = importlib.import_module('.mod', 'lib.deep').work",
        "f = __import__('lib.deep.mod', fromlist=['work']).work",
    ],
)
def test_every_way_to_import(lib, patcher, statement):
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", _new)])
    scope = {}
    exec(statement, scope)
    assert scope["f"] is _new


def test_loader_and_spec_stay_as_they_are(lib, patcher):
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", _new)])
    patched = importlib.import_module("lib.deep.mod").__spec__
    del sys.modules["lib.deep.mod"]
    patcher.revert()
    plain = importlib.import_module("lib.deep.mod").__spec__
    assert type(patched) is type(plain) and type(patched.loader) is type(plain.loader)
    assert vars(patched).keys() == vars(plain).keys() and patched.origin == plain.origin


def test_a_package_and_its_reexport(write, patcher):
    write(lib__mod=LIB)
    write(lib__init="from lib.mod import work\nagain = work")
    patcher.apply("x", [Patch.replace("lib.mod:work", _new), Patch.add("lib:extra", 5)])
    import lib

    assert lib.work is lib.again is _new and lib.extra == 5


def test_values_that_import_the_target_themselves(lib, write, patcher):
    write(
        better="""
        from lib.deep import mod
        from lib.deep.mod import work as original
        def work(x):
            return "new " + original(x)
        """
    )
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", "better:work")])
    assert importlib.import_module("lib.deep.mod").work(1) == "new old"


def test_loading_a_value_may_import_another_awaited_module(lib, write, patcher):
    write(lib__second="def work(x):\n    return 'second'", helper="import lib.second\nnew = 5")
    write(lib__third="limit = 1")
    patches = [Patch.wrap("lib.second:work", lambda original: lambda x: "new " + original(x))]
    patcher.apply("x", [*patches, Patch.replace("lib.third:limit", "helper:new")])
    third = importlib.import_module("lib.third")
    assert third.limit == 5 and sys.modules["lib.second"].work(1) == "new second"
    assert states(patcher) == ["applied", "applied"] and not hooks()


def test_two_values_of_one_module_that_imports_both_targets(write, patcher):
    write(
        lib__a="def f(x):\n    return 'a'",
        lib__b="def f(x):\n    return 'b'",
        better="""
        import lib.a
        import lib.b
        class Kit:
            def a(x):
                return "new a"
            def b(x):
                return "new b"
        """,
    )
    patcher.apply("x", [Patch.replace(f"lib.{n}:f", f"better:Kit.{n}") for n in "ab"])
    a = importlib.import_module("lib.a")
    assert a.f(1) == "new a" and importlib.import_module("lib.b").f(1) == "new b"
    assert states(patcher) == ["applied", "applied"] and not hooks()


@pytest.mark.parametrize("second", ["work", "gone"])
def test_a_factory_imports_the_module_of_another_patch(lib, write, patcher, second):
    write(lib__first="def f(x):\n    return 'first'")
    first = importlib.import_module("lib.first")
    original = first.f

    def factory(original):
        importlib.import_module("lib.deep.mod")
        return lambda x: "new " + original(x)

    patches = [Patch.wrap("lib.first:f", factory), Patch.replace(f"lib.deep.mod:{second}", _new)]
    if second == "gone":
        with pytest.raises(PatchError, match="has no gone"):
            patcher.apply("x", patches)
        assert first.f is original and patcher.report() == []
    else:
        patcher.apply("x", patches)
        assert first.f(1) == "new first" and sys.modules["lib.deep.mod"].work is _new
    assert not hooks()


def test_a_module_that_is_being_imported(write, patcher):
    write(
        half="""
        def early(x):
            return "old"
        import half_user
        def late(x):
            return "old"
        """,
        half_user="""
        import sys
        from half import early
        apply()
        assert not hasattr(sys.modules["half"], "late")
        """,
    )
    patches = [Patch.replace("half:early", _new), Patch.replace("half:late", _new)]
    import builtins

    builtins.apply = lambda: patcher.apply("x", patches)
    try:
        import half
    finally:
        del builtins.apply
    assert half.early is half.late is sys.modules["half_user"].early is _new
    assert states(patcher) == ["applied", "applied"]


def test_a_module_patches_with_its_own_values_while_it_is_imported(lib, write, patcher):
    write(
        own="""
        from mindspeed.patching import Patch
        def work(x):
            return "own"
        patcher.apply("own", [Patch.replace("lib.deep.mod:work", "own:work")])
        during = mod.work
        """
    )
    import builtins

    builtins.patcher, builtins.mod = patcher, importlib.import_module("lib.deep.mod")
    try:
        import own
    finally:
        del builtins.patcher, builtins.mod
    assert own.during is own.work


def test_an_error_comes_out_of_the_import_and_comes_again(write, patcher):
    write(lib__mod=LIB, lib__user="from lib.mod import work")
    patcher.apply("gone", [Patch.replace("lib.mod:gone", _new)])
    patcher.apply("fine", [Patch.replace("lib.mod:work", _new)])
    for _ in range(2):
        with pytest.raises(PatchError, match="gone: cannot replace lib.mod:gone .*has no gone"):
            import lib.user  # noqa: F401
        assert "lib.mod" not in sys.modules and "lib.user" not in sys.modules
    assert states(patcher) == ["waiting", "waiting"]
    patcher.revert("gone")
    assert importlib.import_module("lib.user").work is _new


def test_an_import_that_fails_leaves_the_patch_waiting(write, patcher, tmp_path):
    write(lib__mod="1 / 0")
    patcher.apply("x", [Patch.replace("lib.mod:work", _new)])
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("lib.mod")
    assert states(patcher) == ["waiting"] and len(hooks()) == 1
    write(lib__mod=LIB + "    # longer, so that the cached byte code is not taken\n")
    assert importlib.import_module("lib.mod").work is _new


def test_revert_while_waiting(lib, patcher):
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", _new)])
    patcher.revert("x")
    assert not hooks() and patcher.report() == []
    assert importlib.import_module("lib.deep.mod").work(1) == "old"


def test_two_patchers_wait_for_one_module(lib):
    first, second = Patcher(), Patcher()
    wrap = Patch.wrap("lib.deep.mod:work", lambda original: lambda x: f"<{original(x)}>")
    first.apply("a", [wrap])
    second.apply("b", [wrap])
    module = importlib.import_module("lib.deep.mod")
    assert module.work(1) == "<<old>>" and not hooks()
    # The inner one first: both must come off in either order.
    second.revert()
    first.revert()
    assert not hooks()


def test_imports_in_other_threads(lib, patcher):
    patcher.apply("x", [Patch.replace("lib.deep.mod:work", _new)])
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(importlib.import_module("lib.deep.mod").work))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [_new] * 8
