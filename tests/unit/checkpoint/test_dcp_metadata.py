""".metadata is rebuilt from an explicit list of classes and fields; all else in it is refused."""

import io
import os
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from mindspeed.checkpoint.dcp_metadata import read_dcp_metadata
from mindspeed.checkpoint.dcp_reader import weights_only
from mindspeed.config import ConfigError

TORCH = "torch.distributed.checkpoint"


class Command:
    """Unpickling it anywhere runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def dataclass_chain(marker):
    """Return a pickle that names torch's checkpoint modules only, and runs code.

    torch looks the names up as attributes, so what these modules import can be called:
    `dataclass` runs `exec` on the names of fields, which BUILD sets on any class.
    """
    code = f"a=__import__('os').system('touch {marker}'),*"  # a parameter of what is executed
    switched_off = b"".join(text(each) + b"\x89s" for each in ("init", "repr", "compare"))
    field = name(f"{TORCH}.metadata", "field") + b")RN}" + switched_off + b"\x86bq\x00"
    annotations = b"N}" + text("__annotations__") + b"}" + text(code) + b"Nss"
    build = name(f"{TORCH}.metadata", "StorageMeta") + annotations + text(code) + b"h\x00s\x86b"
    module = name(f"{TORCH}.filesystem", "_get_device_module") + text("cpu") + b"\x85R0"
    dataclass = name(f"{TORCH}.metadata", "dataclass")
    return b"\x80\x02" + module + field + b"0" + dataclass + build + b"\x85R."


def test_the_chain_runs_where_names_are_looked_up(tmp_path):
    """Otherwise the test below would prove nothing."""
    path = tmp_path / "chain"
    path.write_bytes(dataclass_chain(tmp_path / "ran"))
    code = f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
    assert (tmp_path / "ran").exists()


def refused(folder, content, *reasons):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_dcp_metadata(folder)
    message = str(raised.value)
    assert message.startswith(str(folder / ".metadata")) and "\n" not in message
    assert all(reason in message for reason in reasons), message


def test_names_beside_the_list_are_refused(tmp_path):
    marker = tmp_path / "ran"
    refused(tmp_path, dataclass_chain(marker), f"{TORCH}.filesystem._get_device_module")
    for module, attribute in (
        (f"{TORCH}.metadata", "field"),
        (f"{TORCH}.metadata", "dataclass"),
        (f"{TORCH}.metadata", "os"),
        (f"{TORCH}.filesystem", "pickle"),
        (f"{TORCH}.filesystem", "FileSystem"),
        (f"{TORCH}.planner", "io"),
        ("megatron.core.dist_checkpointing.strategies.torch", "pickle"),
        ("torch", "load"),
        ("torch", "hub"),
        ("torch", "strided"),
        ("torch", "float32.__class__"),
        ("torch.serialization", "load"),
        ("builtins", "getattr"),
    ):
        content = b"\x80\x02" + name(module, attribute) + b"."
        refused(tmp_path, content, f"it names {module}.{attribute}")
    assert not marker.exists()


@pytest.mark.parametrize(
    "body, reason",
    [
        (name("torch", "Size") + b")R}b.", "has none"),
        (name(f"{TORCH}.metadata", "Metadata") + b"}b.", "has none"),
        (name(f"{TORCH}.metadata", "Metadata") + b"N}\x86b.", "has none"),
        (name(f"{TORCH}.metadata", "Metadata") + b")\x81}" + text("__class__") + b"Nsb.", "fields"),
        (name(f"{TORCH}.metadata", "Metadata") + b")\x81N}\x86b.", "fields"),
        (name(f"{TORCH}.metadata", "Metadata") + b"K\x01\x85R.", "with arguments"),
        (name("torch", "float32") + b")R.", "not one of the known classes"),
        (text("x") + b")R.", "not one of the known classes"),
        (text("id") + b"Q.", "is damaged"),
        (b"Pid\n.", "is damaged"),
        (b"\x82\x01.", "is damaged"),
        (b"(" + name("torch", "Size") + b"o.", "is damaged"),
        (b"(itorch\nSize\n.", "is damaged"),
        (name("torch", "Size") + b")}\x92.", "is damaged"),
    ],
)
def test_instructions_beside_the_list_are_refused(tmp_path, body, reason):
    refused(tmp_path, b"\x80\x02" + body, reason)


def saved(folder, **more):
    state = {"w": torch.arange(12.0).reshape(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save(state | more, checkpoint_id=folder, no_dist=True)
    with (folder / ".metadata").open("rb") as file:
        return state, pickle.load(file)


def change(folder, metadata):
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore")
def test_what_torch_writes_is_rebuilt(tmp_path):
    _, written = saved(tmp_path, step=3, nested={"a": [torch.ones(2), 5]})
    found = read_dcp_metadata(tmp_path)
    assert type(found) is Metadata
    written.storage_meta = StorageMeta()
    assert found == written
    written.planner_data = OrderedDict(written.planner_data)
    written.mcore_data = {"w": {"nd_reformulated_orig_global_shape": torch.Size((3, 4))}, "b": {}}
    change(tmp_path, written)
    found = read_dcp_metadata(tmp_path)
    assert found == written and found.mcore_data == written.mcore_data


@pytest.mark.filterwarnings("ignore")
def test_values_of_other_kinds_are_refused(tmp_path):
    _, metadata = saved(tmp_path)
    keep = pickle.dumps(metadata)
    (index, info), *_ = metadata.storage_data.items()
    for owner, field, value in (
        (metadata, "state_dict_metadata", [1]),
        (metadata, "storage_data", None),
        (metadata, "planner_data", {"w": {}}),
        (metadata, "mcore_data", {"w": {"shape": (1,)}}),
        (info, "relative_path", "../x"),
        (info, "relative_path", ".."),
        (info, "offset", -1),
        (info, "length", True),
        (info, "length", 1 << 63),
        (info, "transform_descriptors", ["zip"]),
        (metadata.state_dict_metadata["w"], "chunks", 5),
        (metadata.state_dict_metadata["w"], "size", ("3", 4)),
        (metadata.state_dict_metadata["w"], "properties", None),
        (metadata.state_dict_metadata["w"].properties, "dtype", "float32"),
    ):
        before = getattr(owner, field, None)
        object.__setattr__(owner, field, value)
        refused(tmp_path, pickle.dumps(metadata), "refused")
        object.__setattr__(owner, field, before)
    refused(tmp_path, pickle.dumps({index: info}), "not Metadata")
    (tmp_path / ".metadata").write_bytes(keep)
    assert read_dcp_metadata(tmp_path).storage_data[index] == info


def hidden(folder, marker, entry="half"):
    """Append an object that runs code to a file, and let an entry point at it."""
    state, metadata = saved(folder, entry_state={"scale": 1})
    (file,) = folder.glob("*.distcp")
    stream = io.BytesIO()
    torch.save([Command(marker)], stream)
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + stream.getvalue())
    for index, info in metadata.storage_data.items():
        if index.fqn == entry:
            info.offset, info.length = offset, len(stream.getvalue())
            metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k != index}
            object.__setattr__(index, "offset", None)
            metadata.storage_data[index] = info
            break
    metadata.state_dict_metadata[entry] = BytesStorageMetadata()
    change(folder, metadata)
    return state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ["half", "entry_state.scale"])
def test_entries_of_bytes_do_not_run(tmp_path, entry):
    folder, marker = tmp_path / "dcp", tmp_path / "ran"
    state = hidden(folder, marker, entry) | {"entry_state": {"scale": 0}}
    metadata = read_dcp_metadata(folder)

    def load(**how):
        with pytest.raises(dcp.CheckpointException) as raised:
            dcp.load(dict(state), no_dist=True, **how)
        assert f"__0_0.distcp: the entry {entry} cannot be loaded safely" in str(raised.value)
        assert not marker.exists()

    with weights_only(folder, metadata):
        load(storage_reader=dcp.FileSystemReader(folder))
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert marker.exists(), "torch's own planner runs it: else this proves nothing"


@pytest.mark.filterwarnings("ignore")
def test_extra_state_comes_without_its_bytes(tmp_path):
    """Megatron's grouped experts unpickle these tensors after the load."""
    states = {
        "empty": [torch.empty(0, dtype=torch.uint8)],
        "none": [None],
        "tensor": [torch.frombuffer(bytearray(pickle.dumps(Command("x"))), dtype=torch.uint8)],
        "stream": io.BytesIO(b"scales"),
    }
    named = {f"{key}._extra_state": value for key, value in states.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(named, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    metadata = read_dcp_metadata(tmp_path)
    wanted = dict.fromkeys(metadata.state_dict_metadata)
    with weights_only(tmp_path, metadata):
        reader = dcp.FileSystemReader(tmp_path)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    empty = torch.empty(0, dtype=torch.uint8)
    expected = {"empty": [empty], "none": [None], "tensor": [empty], "stream": empty}
    for key, value in expected.items():
        assert repr(planner.state_dict[f"{key}._extra_state"]) == repr(value)


def test_common_file_is_loaded_as_weights_only(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "common.pt"
    torch.save({"optimizer": Command(marker)}, path)
    with weights_only(tmp_path, Metadata({})), pytest.raises(ConfigError, match="common.pt"):
        torch.load(path, weights_only=False)
    assert not marker.exists()


def test_megatron_inherits_what_is_made_safe():
    """Its reader and planner change between releases; these methods have to stay torch's."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    reader = strategies.CachedMetadataFileSystemReader
    assert "load_bytes" not in vars(strategies.MCoreLoadPlanner)
    assert issubclass(strategies.MCoreLoadPlanner, dcp.DefaultLoadPlanner)
    assert reader.__mro__[1] is strategies.FileSystemReader is dcp.FileSystemReader
    assert Path(strategies.__file__).read_text().count("pickle.load") == 0
