"""The clients that are checked, each with the pinned packages that its folder holds."""

from dataclasses import dataclass

DEFAULT_CORE = "0.16.1"


@dataclass(frozen=True)
class Client:
    """One project that drives Megatron, with what it needs beside the environment of `make setup`.

    `requirements` are installed without their dependencies, so every package that the environment
    lacks is listed; one that it has in another version may be listed too and wins. Never torch.
    """

    name: str
    requirements: tuple[str, ...]
    cores: tuple[str, ...] = (DEFAULT_CORE,)
    """The versions of megatron-core that it is checked with."""

    @property
    def module(self) -> str:
        """The module that holds its CASES and OWN failures."""
        return f"tests.clients.check_{self.name.replace('-', '_')}"


# datasets and what it imports; make setup installs them on Python 3.10 too.
DATASETS = (
    *("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19"),
    'pandas==3.1.1; python_version >= "3.11"',
    'pandas==2.3.3; python_version < "3.11"',
    'pytz==2026.6; python_version < "3.11"',  # which that pandas imports
)
# For clients that read the configs of transformers 4 (rope_theta beside the other fields).
TRANSFORMERS_4 = (
    *("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2"),
    "fsspec==2025.10.0",
)

CLIENTS = (
    Client(
        "mcore-bridge",
        ("mcore-bridge==1.6.5", "modelscope==1.35.4", "peft==0.20.0", *DATASETS),
        cores=(DEFAULT_CORE, "0.19.2"),
    ),
    Client(
        "megatron-bridge",
        (
            "megatron-bridge==0.3.1",
            *TRANSFORMERS_4,
            *("hydra-core==1.3.2", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3"),
            *("datasets==4.4.2", "dill==0.4.0", "multiprocess==0.70.18", "pandas==3.1.1"),
            *("httpx==0.28.1", "httpcore==1.0.9"),
            *("nvidia-modelopt==0.44.0", "six==1.17.0"),
        ),
    ),
    Client("mbridge", ("mbridge==0.15.1", *TRANSFORMERS_4)),
    Client(
        "ms-swift",
        (
            *("ms-swift==4.6.0", "mcore-bridge==1.6.5"),
            *("transformers==5.19.0", "peft==0.20.0", "trl==0.29.1"),  # the newest it allows
            *("datasets==4.8.4", "dill==0.4.1", "multiprocess==0.70.19", "pandas==3.1.1"),
            *("httpx==0.28.1", "httpcore==1.0.9", "simplejson==4.3.0", "json-repair==0.64.2"),
            *("modelscope==1.40.2", "modelscope-hub==0.5.1", "cryptography==50.0.2", "cffi==2.1.1"),
            *("aiohttp==3.14.5", "aiohappyeyeballs==2.7.1", "aiosignal==1.4.0", "attrs==26.1.0"),
            *("frozenlist==1.8.0", "multidict==7.2.1", "propcache==0.5.4", "yarl==1.25.1"),
        ),
    ),
    Client(
        "verl",
        (
            *("verl==0.9.1", "megatron-bridge==0.3.1", "mbridge==0.15.1", "ray==2.55.1"),
            *("tensordict==0.10.0", "pyvers==0.2.3", "cloudpickle==3.1.2", "codetiming==1.4.0"),
            *("hydra-core==1.3.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3"),
            *("datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "pandas==3.1.1"),
            *("fastapi==0.121.0", "starlette==0.49.3", "uvicorn==0.54.0", "msgpack==1.2.4"),
            *("jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "attrs==26.1.0"),
            *("referencing==0.37.0", "rpds-py==2026.9.1", "pytz==2026.6", "six==1.17.0"),
        ),
    ),
)
