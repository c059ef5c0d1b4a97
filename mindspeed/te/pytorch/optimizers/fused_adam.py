"""FusedAdam: Adam / AdamW whose master weights and moments may be stored in fewer bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed.ops.adamw import adamw, halves
from mindspeed.ops.adamw.reference import AdamHyper
from mindspeed.optim.host_state import HostState, Piece
from mindspeed.optim.low_precision import FLOAT8_STORAGE, STATE_DTYPES, decode, encode

MASTER = "master_param"
MOMENTS = ("exp_avg", "exp_avg_sq")
MARKED = "exp_avg_sq"
"""The moment that is never negative: its sign bits belong to the remainders of masters."""


class FusedAdam(torch.optim.Optimizer):
    """Adam on lists of tensors; the step count lives in the param group, as Megatron expects.

    Args:
        adam_w_mode: decoupled weight decay (AdamW); otherwise the decay is part of the gradient.
        master_weights: keep `master_param` for every parameter and update that.
        use_decoupled_grad: read `param.decoupled_grad` instead of `param.grad`.
        store_param_remainders: keep only the 16 bits of the master that a bfloat16 parameter lacks;
            a 17th, for masters half way between two parameters, is the sign of `exp_avg_sq`.
    """

    updates_halves = True
    """Update parameters and remainders in one pass, not one parameter at a time in float32."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        for name, wanted in (("amsgrad", amsgrad), ("capturable", capturable)):
            if wanted:
                raise ValueError(f"FusedAdam({name}=True) is not supported: use {name}=False")
        self._dtypes = dict(zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype)))
        if master_weights:
            self._dtypes[MASTER] = master_weight_dtype
        _check_dtypes(self._dtypes)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.grad_scale: Tensor | None = None
        """A scalar on the device that the next steps multiply the gradients by; NaN: no update."""
        self.copies: dict[Tensor, Tensor] = {}
        """Tensors, by parameter, that the next steps also write the new weights to, where weights
        and moments are float32 and on the device; `copied` collects the parameters served."""
        self.copied: set[Tensor] = set()
        self.host: HostState | None = None
        """What keeps the state on the host between steps, if it is to be there."""
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self._scales: dict[Tensor, dict[str, Tensor | None]] = {}
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def initialize_state(self, param: Tensor) -> None:
        """Create zero moments, and the master weights where they are kept."""
        if param.dtype == torch.float64:
            raise TypeError("FusedAdam computes in float32: use torch.optim for float64 parameters")
        for name in MOMENTS:
            self._store(param, name, torch.zeros_like(param, dtype=torch.float32))
        if self.master_weights:
            self._store(param, MASTER, param.detach().float().clone())

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a state tensor in float32, whatever it is stored in.

        Of state on the host it is a copy: Megatron may save it in the background of the next steps.
        """
        stored = self.state[param][state_name]
        if self._has_remainder(param):
            if state_name == MASTER:
                marks = halves.marks_of(self.state[param][MARKED])
                return halves.join_weight(param.detach().to(stored.device), stored, marks)
            if state_name == MARKED:
                stored = halves.without_marks(stored)
        state = decode(stored, self._scales.get(param, {}).get(state_name))
        return state if self.host is None else self.host.snapshot(state)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store a float32 state tensor; master weights also set the parameter they belong to."""
        self._store(param, state_name, unscaled_state)
        if state_name == MASTER:
            self._write_param(param, unscaled_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the usual state dict with every state tensor in float32."""
        packed = super().state_dict()
        ids = [index for group in packed["param_groups"] for index in group["params"]]
        for index, param in zip(ids, self._all_params()):
            if index in packed["state"]:
                packed["state"][index] = {
                    name: self.get_unscaled_state(param, name) if name in self._dtypes else value
                    for name, value in packed["state"][index].items()
                }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or tensors that are in their storage type already."""
        # torch's own loader would cast the moments to the dtype of a bfloat16 parameter.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(ids, self._all_params()):
            state = state_dict["state"].get(index, {})
            # The master after the moments: a part of it is stored with one of them.
            names = [name for name in (*MOMENTS, MASTER) if name in state]
            for name in dict.fromkeys((*names, *state)):
                value = state[name]
                if name in self._dtypes:
                    self._store(param, name, value.to(param.device))
                else:
                    self.state[param][name] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients that `step` reads."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for param in self._all_params():
            grad = getattr(param, "decoupled_grad", None)
            if set_to_none:
                param.decoupled_grad = None  # type: ignore[attr-defined]  # Megatron's
            elif grad is not None:
                grad.zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            active = [param for param in group["params"] if self._grad(param) is not None]
            for param in active:
                if not self.state[param]:
                    self.initialize_state(param)
            hyper = self._hyper(group)
            direct = [param for param in active if self._is_direct(param)]
            self._update(direct, hyper)
            in_halves = [param for param in active if self._is_in_halves(param)]
            self._update_halves(in_halves, hyper)
            # One at a time: the float32 copies of the whole group would cost what the dtypes save.
            if len(direct) + len(in_halves) < len(active):
                for param in active:
                    if not (self._is_direct(param) or self._is_in_halves(param)):
                        self._update_encoded(param, hyper)
        return loss

    def _hyper(self, group: dict[str, Any]) -> AdamHyper:
        return AdamHyper(
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=group["step"],
            decoupled=self.adam_w_mode,
            bias_correction=group["bias_correction"],
        )

    def _update(self, params: list[Tensor], hyper: AdamHyper) -> None:
        """Update parameters whose state is float32, in place, in one pass over all of them."""
        if not params:
            return
        if self.host is not None:
            self._update_in_pieces(params, hyper)
            return
        if self.master_weights:
            self._update_direct(params, hyper, params)
            return
        served = [param for param in params if param in self.copies]
        self._update_direct(served, hyper, [self.copies[param] for param in served])
        self._update_direct([param for param in params if param not in self.copies], hyper, [])
        self.copied.update(served)

    def _update_direct(self, params: list[Tensor], hyper: AdamHyper, copies: list[Tensor]) -> None:
        if not params:
            return
        states = [self.state[param] for param in params]
        weights = [state[MASTER] for state in states] if self.master_weights else params
        moments = [[state[name] for state in states] for name in MOMENTS]
        self._apply(params, weights, moments, hyper, copies)

    def _update_halves(self, params: list[Tensor], hyper: AdamHyper) -> None:
        """Update parameters and the remainders of their masters in one pass over all of them."""
        if not params:
            return
        if self.host is not None:
            self._update_in_pieces(params, hyper)
            return
        states = [self.state[param] for param in params]
        moments = [[state[name] for state in states] for name in MOMENTS]
        remainders = [state[MASTER] for state in states]
        weights = [param.detach() for param in params]
        grads, scale = self._grads(params), self.grad_scale
        adamw(weights, grads, *moments, hyper, remainders=remainders, grad_scale=scale)

    def _update_in_pieces(self, params: list[Tensor], hyper: AdamHyper) -> None:
        """Update parameters whose state is on the host, where it returns to, piece by piece."""
        assert self.host is not None
        names = (*MOMENTS, MASTER) if self.master_weights else MOMENTS
        grads = dict(zip(params, self._grads(params)))

        def update(pieces: list[Piece], states: list[dict[str, Tensor]]) -> None:
            weights = [piece.of(piece.param.detach()) for piece in pieces]
            moments = [[state[name] for state in states] for name in MOMENTS]
            arguments: dict[str, Any] = {"grad_scale": self.grad_scale}
            if self.master_weights:
                masters = [state[MASTER] for state in states]
                if self._is_in_halves(pieces[0].param):
                    arguments["remainders"] = masters
                else:
                    weights, arguments["copies"] = masters, weights
            cut = [piece.of(grads[piece.param]) for piece in pieces]
            adamw(weights, cut, *moments, hyper, **arguments)

        for param in params:
            for name in names:
                self.state[param][name] = self.host.place(self.state[param][name])
        self.host.update(
            [(param, {n: self.state[param][n] for n in names}) for param in params], update
        )

    def _update_encoded(self, param: Tensor, hyper: AdamHyper) -> None:
        """Update one parameter in float32, and store its state as it was."""
        weight, *moments = (self._work(param, name) for name in (MASTER, *MOMENTS))
        self._apply([param], [weight], [[moment] for moment in moments], hyper, [])
        for name, moment in zip(MOMENTS, moments):
            if moment is not self.state[param][name]:
                self._store(param, name, moment)
        if self.master_weights and weight is not self.state[param][MASTER]:
            self._store(param, MASTER, weight)
        self._write_param(param, weight)

    def _apply(
        self,
        params: list[Tensor],
        weights: list[Tensor],
        moments: list[list[Tensor]],
        hyper: AdamHyper,
        copies: list[Tensor],
    ) -> None:
        """Take one step on the float32 weights of some parameters."""
        grads = self._grads(params)
        adamw(weights, grads, *moments, hyper, copies=copies, grad_scale=self.grad_scale)

    def _work(self, param: Tensor, name: str) -> Tensor:
        # float32 tensors come back themselves, so that the update happens in place.
        if name == MASTER and not self.master_weights:
            return param.detach().float()
        return self.get_unscaled_state(param, name).to(param.device)

    def _store(self, param: Tensor, name: str, value: Tensor) -> None:
        state = self.state[param]
        has_remainder = self._has_remainder(param)
        if name == MASTER and has_remainder:
            if value.dtype == torch.int16:  # as it is stored; so are the marks
                state[MASTER] = self._place(value)
                return
            _, remainder, marks = halves.split_weight(value.float())
            state[MASTER] = self._place(remainder)
            halves.set_marks(state[MARKED], marks.to(state[MARKED].device))
            return
        stored, scale = encode(value.float(), self._dtypes[name])
        if has_remainder and name == MARKED and name in state:
            stored = stored.clone() if stored is value else stored
            halves.set_marks(stored, halves.marks_of(state[name]).to(stored.device))
        state[name] = self._place(stored)
        self._scales.setdefault(param, {})[name] = scale

    def _place(self, stored: Tensor) -> Tensor:
        return stored if self.host is None else self.host.place(stored)

    def _write_param(self, param: Tensor, weight: Tensor) -> None:
        param.detach().copy_(weight)

    def _has_remainder(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _is_direct(self, param: Tensor) -> bool:
        """Whether weights and moments are float32, to be updated where they are."""
        state = self.state[param]
        weight = state[MASTER] if self.master_weights else param
        moments = state["exp_avg"].dtype, state["exp_avg_sq"].dtype
        return weight.dtype is torch.float32 and moments == (torch.float32, torch.float32)

    def _is_in_halves(self, param: Tensor) -> bool:
        """Whether the master is a parameter and its remainder, to be updated where they are."""
        state = self.state[param]
        moments = {state[name].dtype for name in MOMENTS}
        return self.updates_halves and self._has_remainder(param) and moments == {torch.float32}

    def _grad(self, param: Tensor) -> Tensor | None:
        return getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad

    def _grads(self, params: list[Tensor]) -> list[Tensor]:
        # `step` updates only parameters that have a gradient.
        return [cast("Tensor", self._grad(param)) for param in params]

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]


def wrap_optimizer_init(original: Callable[..., None]) -> Callable[..., None]:
    """Let the FusedAdam inside a new optimizer of Megatron's keep its state on the host."""

    @functools.wraps(original)
    def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, FusedAdam):
            optimizer.host = HostState()

    return init


def wrap_get_optimizer_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy what Megatron's distributed optimizer would save out of host memory itself."""

    @functools.wraps(original)
    def get_optimizer_states(self: Any, model_param: Tensor) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = original(self, model_param)
        host = getattr(self.optimizer, "host", None)
        if host is None:
            return tensors
        return {name: host.snapshot(tensor) for name, tensor in tensors.items()}

    return get_optimizer_states


def _check_dtypes(dtypes: dict[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        allowed = [d for d in STATE_DTYPES if name != MASTER or d != FLOAT8_STORAGE]
        if dtype not in allowed:
            raise ValueError(
                f"FusedAdam cannot keep {name} in {dtype}: use {', '.join(map(str, allowed))}"
            )
