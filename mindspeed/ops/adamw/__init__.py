"""One step of Adam or AdamW on lists of tensors, with an EMA of the weights and a cast copy."""

from mindspeed.ops.dispatch import Impl, Op

_PACKAGE = "mindspeed.ops.adamw"

adamw = Op(
    "adamw",
    reference=f"{_PACKAGE}.reference:adamw",
    impls=(Impl("triton", f"{_PACKAGE}.triton_impl:adamw", device="cuda", needs=("triton",)),),
    check=f"{_PACKAGE}.reference:check",
)
apply_fused_ema_adamw = Op(
    "apply_fused_ema_adamw",
    reference=f"{_PACKAGE}.reference:apply_fused_ema_adamw",
    # The same adapter: the operator adamw inside it runs its Triton kernel.
    impls=(
        Impl(
            "triton",
            f"{_PACKAGE}.reference:apply_fused_ema_adamw",
            device="cuda",
            needs=("triton",),
        ),
    ),
    check=f"{_PACKAGE}.reference:check_apply_fused_ema_adamw",
)
