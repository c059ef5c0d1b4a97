"""AdamW and an exponential moving average of the weights in one pass over one tensor."""

from mindspeed.ops.dispatch import Impl, Op

_ROOM = "mindspeed.ops.apply_fused_ema_adamw"

apply_fused_ema_adamw = Op(
    "apply_fused_ema_adamw",
    reference=f"{_ROOM}.reference:apply_fused_ema_adamw",
    # The same adapter: the operator adamw below it runs its Triton kernel there.
    impls=(
        Impl(
            "triton", f"{_ROOM}.reference:apply_fused_ema_adamw", device="cuda", needs=("triton",)
        ),
    ),
    check=f"{_ROOM}.reference:check",
)
