"""Files that lie, are cut off or would run code are refused, each with its name and the reason."""

import argparse
import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy
import pytest
import torch
from safetensors import SafetensorError, safe_open

from mindspeed.checkpoint.dcp_metadata import read_dcp_tensors
from mindspeed.checkpoint.file_io import MappedFile
from mindspeed.checkpoint.safetensors_file import read_safetensors
from mindspeed.config import ConfigError
from mindspeed.device.cpu import Cpu
from mindspeed_llm.checkpoint.pt_file import read_pt


class Command:
    """Unpickling it anywhere runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), span=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


EIGHT = b"\0" * 8
SAFETENSORS = {
    "empty": (b"", "is empty"),
    "short": (b"\x01\x02", "not a safetensors file"),
    "header_beyond_the_end": (safetensors({}, length=1 << 40), "header would have"),
    "header_of_eight_exabytes": (safetensors({}, length=(1 << 63) + 5), "header would have"),
    "no_json": (safetensors(b"{not json"), "header is not valid"),
    "not_utf8": (safetensors(b'{"\xff": 1}'), "header is not valid"),
    "a_list": (safetensors([1, 2]), "not an object"),
    "deep": (safetensors(b"[" * 100_000 + b"]" * 100_000), "header"),
    "name_twice": (
        safetensors(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"x"),
        "twice",
    ),
    "beyond_the_end": (safetensors({"a": entry(span=(0, 8))}), "cut off"),
    "wrong_size": (safetensors({"a": entry(shape=(3,))}, EIGHT), "takes 8 bytes"),
    "negative": (safetensors({"a": entry(shape=(-2,), span=(8, 0))}, EIGHT), "shape"),
    "huge_shape": (safetensors({"a": entry(shape=(1 << 40, 1 << 40))}, EIGHT), "takes 8 bytes"),
    "backwards": (safetensors({"a": entry(shape=(0,), span=(8, 0))}, EIGHT), "takes -8 bytes"),
    "true_is_no_size": (safetensors({"a": entry(shape=(True,), span=(0, 4))}, EIGHT), "shape"),
    "float_offset": (safetensors({"a": entry(span=(0, 8.0))}, EIGHT), "data_offsets"),
    "three_offsets": (safetensors({"a": entry(span=(0, 8, 9))}, EIGHT), "data_offsets"),
    "unknown_type": (safetensors({"a": entry(dtype="F31")}, EIGHT), "did you mean F32"),
    "type_is_a_list": (safetensors({"a": entry(dtype=["F32"])}, EIGHT), "type"),
    "entry_is_a_number": (safetensors({"a": 5}, EIGHT), "lacks dtype"),
    "overlap": (safetensors({"a": entry(), "b": entry()}, EIGHT), "share bytes"),
    "longer": (safetensors({"a": entry()}, EIGHT * 2), "8 bytes behind a belong to no tensor"),
    "only_data": (safetensors({}, EIGHT), "8 bytes behind the header"),
    "shifted": (safetensors({"a": entry(span=(8, 16))}, EIGHT * 2), "the header and a belong to"),
    "hole": (
        safetensors({"a": entry(), "b": entry(span=(16, 24))}, EIGHT * 3),
        "8 bytes between a and b",
    ),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path, name):
    content, reason = SAFETENSORS[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_safetensors(MappedFile(path))
    assert str(path) in str(raised.value) and reason in str(raised.value)
    with pytest.raises((SafetensorError, OSError, ValueError)):  # its own library refuses it, too
        with safe_open(path, "pt"):
            pass


def saved(tmp_path, value, **options):
    path = tmp_path / "file.pt"
    torch.save(value, path, **options)
    return path


def refused(path, *reasons):
    with pytest.raises(ConfigError) as raised:
        read_pt(path)
    message = str(raised.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert all(reason in message for reason in reasons), message


def test_pt_that_runs_code(tmp_path):
    marker = tmp_path / "ran"
    refused(saved(tmp_path, {"model": Command(marker)}), "refused", "posix.system")
    refused(saved(tmp_path, {"model": {}, "hidden": [Command(marker)]}), "posix.system")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["eval", "exec", "getattr", "__import__"])
def test_pt_that_reaches_for_builtins(tmp_path, name):
    class Call:
        def __reduce__(self):
            return getattr(__builtins__, name, None) or __builtins__[name], ("1",)

    refused(saved(tmp_path, {"model": Call()}), name)


def test_pt_with_object_array(tmp_path):
    """An array of objects is a pickle within a pickle: it comes out as nothing."""
    marker = tmp_path / "ran"
    array = numpy.array([Command(marker)], dtype=object)
    refused(saved(tmp_path, {"model": {}, "rng": array}), "posix.system")
    assert not marker.exists()


def test_pt_of_a_training_is_read(tmp_path):
    """Arguments and random states stand beside the weights of Megatron's own checkpoints."""
    arguments = argparse.Namespace(noop_layers=[1], params_dtype=torch.bfloat16, name="x")
    random_state = numpy.random.RandomState(1).get_state()
    weights = {"w": torch.ones(2, 3)}
    path = saved(tmp_path, {"model": weights, "args": arguments, "rng_state": [random_state]})
    values = read_pt(path)
    assert torch.equal(values["model"]["w"], weights["w"])
    assert values["args"].noop_layers == [1]


def rezipped(path, change):
    """Write the members of an archive again, each as `change` wants it."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            change(archive, name, data)
    return path


def test_pt_archives(tmp_path):
    def compress(archive, name, data):
        archive.writestr(name, data, compress_type=zipfile.ZIP_DEFLATED)

    def without_pickle(archive, name, data):
        if not name.endswith("data.pkl"):
            archive.writestr(name, data)

    def short_data(archive, name, data):
        archive.writestr(name, data[:1] if "/data/" in name else data)

    weights = {"model": {"w": torch.zeros(1000)}}
    refused(rezipped(saved(tmp_path, weights), compress), "compressed")
    refused(rezipped(saved(tmp_path, weights), without_pickle), "not one of torch.save")
    refused(rezipped(saved(tmp_path, weights), short_data), "cannot be read safely")
    whole = saved(tmp_path, weights).read_bytes()
    for content in (b"", b"PK", whole[: len(whole) // 2], b"\x80\x02}q\x00.", os.urandom(500)):
        path = tmp_path / "cut.pt"
        path.write_bytes(content)
        refused(path, "is not a torch.save file, or cut off")
    refused(tmp_path / "missing.pt", "cannot be read")
    refused(saved(tmp_path, [1, 2]), "holds a list")


@pytest.mark.filterwarnings("ignore")
def test_pt_that_is_a_program(tmp_path):
    path = tmp_path / "program.pt"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    refused(path, "TorchScript")


def test_tensor_that_is_larger_than_its_storage(tmp_path):
    """A pickle may claim any shape; memory outside the storage is never shown."""
    path = saved(tmp_path, {"model": {"w": torch.zeros(1000)}})

    def enlarge(archive, name, data):
        if name.endswith("data.pkl"):
            data = data.replace(struct.pack("<H", 1000), struct.pack("<H", 60000))
        archive.writestr(name, data)

    refused(rezipped(path, enlarge), "cannot be read safely")


def metadata(tmp_path, value):
    (tmp_path / ".metadata").write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    return tmp_path


def metadata_refused(folder, *reasons):
    with pytest.raises(ConfigError) as raised:
        read_dcp_tensors(folder)
    message = str(raised.value)
    assert message.startswith(str(folder / ".metadata")) and "\n" not in message
    assert all(reason in message for reason in reasons), message


def test_metadata_that_runs_code(tmp_path):
    marker = tmp_path / "ran"
    metadata_refused(metadata(tmp_path, Command(marker)), "refused", "posix.system")
    metadata_refused(metadata(tmp_path, {"a": [Command(marker)]}), "posix.system")
    state = OrderedDict(a=numpy.array([Command(marker)], dtype=object))
    metadata_refused(metadata(tmp_path, state), "numpy")
    assert not marker.exists()


def test_metadata_cannot_take_all_memory(tmp_path):
    """An unpickler in C allocates as many objects as the number says."""
    cpu = Cpu()
    cpu.reset_peak_memory()  # that of tests before may hide what this one looks for
    before = cpu.max_memory_allocated()
    far = (1 << 27).to_bytes(4, "little")
    metadata_refused(metadata(tmp_path, b"\x80\x02]r" + far + b"."), "not Metadata")
    assert cpu.max_memory_allocated() - before < 100 << 20


def real_metadata(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = {"decoder.w": torch.arange(12.0).reshape(3, 4), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


@pytest.mark.filterwarnings("ignore")
def test_metadata_that_lies(tmp_path):
    folder = real_metadata(tmp_path)
    content = (folder / ".metadata").read_bytes()
    assert read_dcp_tensors(folder)["decoder.w"].shape == (3, 4)
    for cut in range(0, len(content) - 1, 37):
        metadata_refused(metadata(tmp_path, content[:cut]))
    outside = content.replace(b"__0_0.distcp", b"../../passwd")
    metadata_refused(metadata(tmp_path, outside), "not a file of this folder")
    metadata_refused(metadata(tmp_path, 5), "not Metadata")
    metadata_refused(tmp_path / "nowhere", "cannot be read")
    with pytest.raises(ConfigError, match="is damaged|refused"):
        read_dcp_tensors(metadata(tmp_path, pickle.dumps(list(range(10)))[:-1] + b"!."))


@pytest.mark.filterwarnings("ignore")
def test_distcp_files_that_lie(tmp_path):
    """Damage anywhere in the data is an error or harmless; nothing of it runs."""
    from mindspeed.checkpoint.dcp_files import DcpFiles

    folder = real_metadata(tmp_path)
    tensor = read_dcp_tensors(folder)["decoder.w"]
    (chunk,) = tensor.chunks
    data = (folder / chunk.file).read_bytes()
    assert torch.equal(DcpFiles(folder).values(chunk), torch.arange(12.0).reshape(3, 4))

    marker = tmp_path / "ran"
    stream = io.BytesIO()
    torch.save(Command(marker), stream)
    hostile = stream.getvalue().ljust(len(data), b"\0")
    for content in (hostile, data[: len(data) // 2], b"", os.urandom(len(data))):
        (folder / chunk.file).write_bytes(content)
        with pytest.raises(ConfigError, match=chunk.file):
            DcpFiles(folder).values(chunk)
    (folder / chunk.file).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        DcpFiles(folder).values(chunk)
    assert not marker.exists()
