"""Tiny HF models, saved once."""

import pytest

from tests.llm import tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the folder of every tiny model."""
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.save(name, folder) for name in tiny.MODELS}


@pytest.fixture
def llama(models):
    return models["llama"]


@pytest.fixture
def mcore(llama, tmp_path):
    """Return the small llama as an mcore checkpoint of two stages."""
    from mindspeed_llm.checkpoint import ConvertOptions
    from mindspeed_llm.checkpoint.conversion import convert

    convert(
        ConvertOptions(
            load_dir=str(llama), save_dir=str(tmp_path / "mg"), target_pipeline_parallel_size=2
        )
    )
    return tmp_path / "mg"
