"""A folder with small processors and images, and datasets made of a few records."""

import json

import numpy as np
import pytest
from PIL import Image

from mindspeed.config import build
from mindspeed_mm.data.dataset import build_datasets
from mindspeed_mm.data.options import DatasetOptions
from mindspeed_mm.data.processor import MediaProcessor, load_processor
from tests.mm import processors

SIZES = {"a.png": (40, 16), "b.png": (16, 30), "c.png": (9, 9)}


class Data:
    """Builds datasets in a folder that has the processors and the images."""

    def __init__(self, root):
        self.root = root
        self._processors = {}

    def options(self, records, *, model="qwen2_5_vl", attr=None, basic=None, more=None):
        path = self.root / "records.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        values = {
            "attr": attr or {},
            "basic_parameters": {"dataset": str(path), **(basic or {})},
            "preprocess_parameters": {"model_name_or_path": str(self.root / model), **(more or {})},
        }
        return build(DatasetOptions, values)

    def open(self, records, **more):
        options = self.options(records, **more)
        return build_datasets(options, self.processor(options.preprocess_parameters))

    def processor(self, parameters):
        if parameters not in self._processors:
            made = MediaProcessor(load_processor(parameters), parameters)
            self._processors[parameters] = made
        return self._processors[parameters]

    def samples(self, records, **more):
        return [one for row in self.open(records, **more) for one in row]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Return the builder of datasets."""
    root = tmp_path_factory.mktemp("mm")
    for model in processors.MAKERS:
        processors.save(model, root / model)
    random = np.random.default_rng(0)
    for name, (width, height) in SIZES.items():
        pixels = random.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(root / name)
    return Data(root)
