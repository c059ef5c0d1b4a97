"""The weights of a model as every reader returns them."""

from dataclasses import dataclass, field

from mindspeed.checkpoint.assembly import FullTensor
from mindspeed.checkpoint.digests import Ranges
from mindspeed.checkpoint.file_io import MappedFile
from mindspeed_llm.models.config import ModelConfig


@dataclass
class WeightSource:
    """The full weights of a model by their Megatron names, as views of files."""

    config: ModelConfig
    tensors: dict[str, FullTensor]
    files: list[MappedFile] = field(default_factory=list)
    ranges: Ranges = field(default_factory=dict)
    """The byte ranges that are read of files that hold other things as well."""

    def release_pages(self) -> None:
        """Release the memory of what has been read."""
        for file in self.files:
            file.release_pages()
