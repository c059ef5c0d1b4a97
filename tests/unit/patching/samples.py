"""Code to patch, and what to put in its place."""

SHOP = """
    __version__ = "3.2.1"
    LIMIT = 10

    def price(item, count=1):
        return f"price({item},{count})"

    class Base:
        def greet(self, name):
            return f"Base.greet({name})"

    class Counter(Base):
        rate = 5

        def __init__(self, name):
            self.name = name

        def add(self, n):
            return f"add({n})"

        @staticmethod
        def double(n):
            return 2 * n

        @classmethod
        def make(cls, name):
            return cls(name)

        @property
        def label(self):
            return "label " + self.name

        class Inner:
            def run(self, x):
                return x

    class Sibling(Base):
        pass
"""

CRYPT = """
    def hash(data, salt=0):
        return "old"

    class Codec:
        def __init__(self, key=0):
            self.key = key

        def encode(self, data):
            return "old"

        @classmethod
        def default(cls):
            return "old"

        @staticmethod
        def check(data):
            return "old"

        def name(self):
            return super().__repr__() and "old"
"""


def new_hash(data, salt=0):
    """Answer in the place of CRYPT's `hash`."""
    return "new"


def tagging(tag):
    """Return a wrap factory that shows where it stands in the chain."""

    def factory(original):
        def wrapper(*args, **kwargs):
            return f"{tag}<{original(*args, **kwargs)}>"

        return wrapper

    return factory
