"""One step of transformers' model on one long sequence: Liger, checkpoints of layers on the host.

Only --layers of the model are computed, the time of which grows with the square of the length. The
weights, gradients and AdamW state of the others are allocated, so that the device is as full as
with all of them: a layer that is computed again needs the same bytes whichever it is.
"""

import argparse
import json
import resource
import time

import steps
import torch


def main():
    """Train one step; print a JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, rest = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    tokens = torch.randint(0, model.config.vocab_size, (1, options.length), device=device)
    synchronize(device)
    began = time.perf_counter()
    # A checkpointed layer saves its input, which goes to the host; a recomputed one stays here.
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    synchronize(device)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    line = {
        "length": options.length,
        "seconds": seconds,
        "peak_gib": peak / 2**30,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": loss.item(),
        "rest_gib": rest.nbytes / 2**30,
    }
    print(json.dumps(line), flush=True)


def synchronize(device):
    """Wait for the device: its work is only queued when a call returns."""
    if device == "cuda":
        torch.cuda.synchronize()


def build(options, device):
    """Return the model in bfloat16 with some of its layers, and what the others would occupy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(options.model)
    config.max_position_embeddings = max(config.max_position_embeddings, options.length)
    whole, config.num_hidden_layers = config.num_hidden_layers, options.layers
    if device == "cuda":  # its kernels are Triton's
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config.model_type}")()
    torch.manual_seed(1)
    chosen = steps.attention("auto")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=chosen
        )
    model.train()
    model.config.use_cache = False
    # Reentrant: the other kind keeps inputs where no hook sees them.
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    count = 4 * (whole - options.layers) * layer  # weight, gradient, two moments
    return model, torch.empty(count, dtype=torch.bfloat16, device=device)


if __name__ == "__main__":
    main()
