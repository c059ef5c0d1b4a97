"""Row copies of Megatron's inference and Mamba layers in torch, for machines without triton.

Positions arrive as one-element tensors, because on a GPU the host must not wait for them.
"""

from __future__ import annotations

from torch import Tensor


def tensor_get_slice_after(
    input_tensor: Tensor, output_tensor: Tensor, pos_on_device: Tensor, check_bounds: bool = False
) -> None:
    """Copy the rows of the input from the position on to the start of the output."""
    rows = input_tensor[_position(pos_on_device, input_tensor) :]
    if check_bounds:
        _require_same_rows(input_tensor, output_tensor)
        assert len(rows) <= len(output_tensor), (
            f"{len(rows)} rows do not fit into {len(output_tensor)}"
        )
    rows = rows[: len(output_tensor)]
    output_tensor[: len(rows)] = rows


def tensor_merge(
    tensor_a: Tensor,
    tensor_b: Tensor,
    pos_on_device: Tensor,
    output_tensor: Tensor | None = None,
    check_bounds: bool = False,
) -> None:
    """Write rows of `a` up to the position, then all of `b`, into the output or into `a` itself."""
    output = tensor_a if output_tensor is None else output_tensor
    position = _position(pos_on_device, tensor_a)
    if check_bounds:
        _require_same_rows(tensor_a, tensor_b)
        _require_same_rows(tensor_a, output)
        assert len(output) >= len(tensor_a), f"{len(tensor_a)} rows do not fit into {len(output)}"
    if output is not tensor_a:
        output[:position] = tensor_a[:position]
    rows = tensor_b[: len(output) - position]
    output[position : position + len(rows)] = rows


def tensor_masked_update(states: Tensor, idx: Tensor, new_states: Tensor) -> None:
    """Write each new state at its index; an index of -1 means to leave it out."""
    _require_same_rows(states, new_states)
    wanted = idx >= 0
    states[idx[wanted].long()] = new_states[wanted]


def _position(pos_on_device: Tensor, tensor: Tensor) -> int:
    position = int(pos_on_device[0])
    assert 0 <= position <= len(tensor), f"position {position} is outside of {len(tensor)} rows"
    return position


def _require_same_rows(one: Tensor, other: Tensor) -> None:
    assert one.shape[1:] == other.shape[1:], (
        f"rows of shape {tuple(one.shape[1:])} and {tuple(other.shape[1:])} differ"
    )
