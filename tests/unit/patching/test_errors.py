"""A patch that cannot be applied names owner, target and version, and leaves nothing behind."""

import importlib
import sys

import pytest

from mindspeed.patching import Patch, PatchError
from mindspeed.patching.patch import package_version

BANK = """
    __version__ = "7.5"
    RATE = 3

    def pay(amount, *, currency="EUR"):
        return amount

    def take(amount, currency="EUR"):
        return amount

    class Account:
        def __init__(self, owner, limit=0):
            self.owner = owner

        def close(self):
            return "closed"

        @property
        def name(self):
            return self.owner
"""


@pytest.fixture
def bank(write):
    write(bank=BANK)
    return importlib.import_module("bank")


def refuse(patcher, *patches, owner="feature_x"):
    with pytest.raises(PatchError) as caught:
        patcher.apply(owner, patches)
    text = str(caught.value)
    assert text.startswith(f"{owner}: cannot {patches[-1].kind} {patches[-1].target} (bank 7.5): ")
    return text


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("bank:payy", "bank has no payy, did you mean pay?"),
        ("bank:Account.open", "Account has no open"),
        ("bank:Vault.open", "bank has no Vault"),
    ],
)
def test_a_missing_target(bank, patcher, target, missing):
    assert missing in refuse(patcher, Patch.wrap(target, lambda original: original))
    assert missing in refuse(patcher, Patch.replace(target, 1))


def test_add_refuses_what_exists(bank, patcher):
    assert "exists already" in refuse(patcher, Patch.add("bank:pay", 1))
    assert "exists already" in refuse(patcher, Patch.add("bank:Account.__eq__", 1))
    bank.settle = bank.pay
    patcher.apply("wrapper", [Patch.wrap("bank:pay", lambda original: original)])
    assert "exists already" in refuse(patcher, Patch.add("bank:settle", 1))


def test_an_addition_belongs_to_its_owner(bank, patcher):
    patcher.apply("adder", [Patch.add("bank:bonus", len)])
    assert "adder adds it" in refuse(patcher, Patch.wrap("bank:bonus", lambda original: original))


def test_two_replacements_name_both_owners(bank, patcher):
    patcher.apply("feature_a", [Patch.replace("bank:take", _take)])
    assert "feature_a replaces it too" in refuse(patcher, Patch.replace("bank:take", _take))
    assert bank.take is _take


def test_two_replacements_of_a_module_to_come(write, patcher):
    write(bank=BANK)
    patcher.apply("feature_a", [Patch.replace("bank:take", _take)])
    with pytest.raises(PatchError, match="feature_x: .*bank:take.*feature_a replaces it too"):
        patcher.apply("feature_x", [Patch.replace("bank:take", _take)])
    assert [record.owner for record in patcher.report()] == ["feature_a"]


def _take(amount, currency="EUR"):
    return -amount


@pytest.mark.parametrize(
    ("target", "value", "reason"),
    [
        ("bank:take", lambda amount, unit="EUR": 0, "takes (amount, currency=...) but"),
        ("bank:take", lambda amount, currency: 0, "takes (amount, currency):"),
        ("bank:take", lambda amount, *, currency="EUR": 0, "takes (amount, *, currency=...):"),
        ("bank:take", lambda amount, currency="EUR", more=1: 0, "more=...)"),
        ("bank:take", lambda *args, **kwargs: 0, "takes (*args, **kwargs)"),
        ("bank:take", 5, "5 is not"),
        ("bank:Account", lambda owner, limit=0: 0, "a class cannot become"),
        ("bank:Account", type("Other", (), {}), "takes (owner, limit=...) but Other takes ()"),
        ("bank:Account.close", lambda: 0, "takes (self) but"),
        ("bank:Account.name", len, "a property cannot become"),
    ],
)
def test_a_replacement_is_called_like_the_original(bank, patcher, target, value, reason):
    before = dict(vars(bank)), dict(vars(bank.Account))
    assert reason in refuse(patcher, Patch.replace(target, value))
    assert (dict(vars(bank)), dict(vars(bank.Account))) == before


def test_a_method_needs_something_that_binds(bank, patcher):
    class Closer:
        def __call__(self, *args, **kwargs):
            return "never reached with self"

    assert "self" in refuse(patcher, Patch.wrap("bank:Account.close", lambda original: Closer()))


def test_a_failing_factory_and_a_value_that_cannot_be_loaded(bank, patcher):
    assert "ZeroDivisionError" in refuse(patcher, Patch.wrap("bank:take", lambda original: 1 / 0))
    assert "no_such_module" in refuse(patcher, Patch.replace("bank:take", "no_such_module:take"))
    assert "there is no take" in refuse(patcher, Patch.replace("bank:take", "math:take"))


def test_a_member_of_a_class_that_another_owner_takes_away(bank, patcher):
    class Other:
        def __init__(self, owner, limit=0):
            pass

    patcher.apply("taker", [Patch.replace("bank:Account", Other)])
    wrap = Patch.wrap("bank:Account.close", lambda original: original)
    assert "taker replaces the class" in refuse(patcher, wrap)
    patcher.apply("taker", [wrap])


def test_a_builtin_class_cannot_be_set(patcher):
    with pytest.raises(PatchError, match="x: cannot wrap builtins:dict.get .*cannot be set"):
        patcher.apply("x", [Patch.wrap("builtins:dict.get", lambda original: lambda *a, **k: 0)])


def test_all_or_nothing(bank, write, patcher):
    write(till="from bank import pay, take\ntools = [take, pay]")
    till = importlib.import_module("till")
    patcher.apply("first", [Patch.wrap("bank:pay", lambda f: lambda *a, **k: f(*a, **k) + 1)])
    before = dict(vars(bank)), dict(vars(till)), list(till.tools), patcher.report()
    good = Patch.replace("bank:take", _take)
    added = Patch.add("bank:bonus", 1)
    rewrapped = Patch.wrap("bank:pay", lambda f: lambda *a, **k: f(*a, **k) * 10)
    waiting = Patch.replace("bank_later:x", 1)
    refuse(patcher, good, added, rewrapped, waiting, Patch.replace("bank:gone", 1))
    assert (dict(vars(bank)), dict(vars(till)), till.tools, patcher.report()) == before
    assert bank.pay(1) == 2
    patcher.apply("feature_x", [good, added, rewrapped])
    assert till.tools[0] is _take and bank.pay(1) == 11  # feature_x goes under first


def test_a_copy_that_cannot_be_rebound_undoes_everything(bank, write, patcher):
    write(
        strict="""
        from bank import take

        class Closed(type):
            def __setattr__(cls, name, value):
                raise TypeError("closed")

        class Box(metaclass=Closed):
            tool = take
        """
    )
    strict = importlib.import_module("strict")
    original = bank.take
    assert "closed" in refuse(patcher, Patch.replace("bank:take", _take))
    assert bank.take is strict.take is strict.Box.tool is original


def test_an_error_leaves_the_very_wrapper_that_was_there(bank, write, patcher):
    write(keyed="from bank import take\ntable = {}")
    keyed = importlib.import_module("keyed")
    patcher.apply("first", [Patch.wrap("bank:take", lambda f: lambda *a, **k: f(*a, **k) + 1)])
    before = bank.take
    keyed.table[before] = 1

    class Unhashable:
        __hash__ = None

        def __call__(self, *args, **kwargs):
            return 0

    refuse(patcher, Patch.wrap("bank:take", lambda original: Unhashable()), owner="second")
    assert bank.take is keyed.take is before and list(keyed.table) == [before]


def test_a_module_that_its_package_does_not_have(bank, write, patcher):
    write(vault__door="x = 1")
    for target in ("vault.window:x", "bank.window:x"):
        with pytest.raises(PatchError, match="there is no module"):
            patcher.apply("feature_x", [Patch.replace(target, 2)])
    patcher.apply("feature_x", [Patch.replace("vault.door:x", 2), Patch.replace("absent:x", 2)])
    assert [record.state for record in patcher.report()] == ["waiting", "waiting"]
    assert "vault" not in sys.modules


@pytest.mark.parametrize("target", ["bank", "bank.pay", "bank:", ":pay", "bank:pay:now", "b k:x"])
def test_malformed_targets(target):
    with pytest.raises(ValueError, match="pkg.module:Qual.name"):
        Patch.replace(target, 1)


def test_a_factory_is_a_callable_or_a_reference():
    with pytest.raises(ValueError, match="give a callable"):
        Patch.wrap("bank:pay", 3)


def test_versions(bank, write, tmp_path):
    import megatron.core

    assert package_version("bank.sub") == "bank 7.5"
    assert package_version("megatron.training.x") == f"megatron.core {megatron.core.__version__}"
    assert package_version("pytest").startswith("pytest ")
    assert package_version("nowhere.at.all") == "nowhere, version unknown"
    info = tmp_path / "till_kit-4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: till-kit\nVersion: 4.0\n")
    (info / "top_level.txt").write_text("till\n")
    assert package_version("till.sub") == "till-kit 4.0"
