"""Open any directory with weights."""

from pathlib import Path

from mindspeed.checkpoint.digests import verify
from mindspeed.config import ConfigError
from mindspeed_llm.checkpoint.adapters import merged
from mindspeed_llm.checkpoint.dcp_source import open_dcp
from mindspeed_llm.checkpoint.detection import HF_FOLDER, Found
from mindspeed_llm.checkpoint.hf_source import open_hf
from mindspeed_llm.checkpoint.mcore_source import open_mcore
from mindspeed_llm.checkpoint.source import Source
from mindspeed_llm.models.families import read_shape
from mindspeed_llm.models.shape import ModelShape


def open_source(
    found: Found,
    configs: Path | None = None,
    *,
    shape: ModelShape | None = None,
    named: str | None = None,
    noop_layers: tuple[int, ...] = (),
) -> Source:
    """Map the weights of a directory; the shape is that of config.json unless it is given."""
    if found.kind == "hf":
        return open_hf(found.folder, named, shape)
    if shape is None:
        shape = read_shape(configs or config_folder(found), named=named)
    if found.kind == "torch_dist":
        return merged(open_dcp(found.folder, shape), found.folder)
    return open_mcore(found.folder, shape, noop_layers)


def verify_source(found: Found, source: Source, *, enabled: bool, is_shared: bool = False) -> None:
    """Verify what will be read of an opened directory; HF models from elsewhere have no digests."""
    verify(
        found.folder,
        enabled=enabled,
        ranges=source.ranges,
        is_shared=is_shared,
        is_expected=found.kind != "hf",
    )


def config_folder(found: Found, given: str | None = None, other: Path | None = None) -> Path:
    """Return the folder with the HF config of a checkpoint: the given one, its own or another."""
    if given is not None:
        if not (Path(given) / "config.json").is_file():
            raise ConfigError(f"--hf-cfg-dir {given}: has no config.json")
        return Path(given)
    if (own := found.config_folder) is not None:
        return own
    if other is not None and (other / "config.json").is_file():
        return other
    looked = dict.fromkeys((found.folder, found.root / HF_FOLDER, found.root))
    raise ConfigError(
        f"{found.root}: no config.json tells what model this is: looked in "
        f"{' and in '.join(map(str, looked))}: give --hf-cfg-dir"
    )
