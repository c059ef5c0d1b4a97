"""Record what TRL's trainers do with the pairs of tests.llm.preferences: `python -m
tests.llm.trl_values`, with trl installed, writes tests/assets/trl_values.json."""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.llm.preferences import (
    BATCH,
    EOS,
    KTO_BATCH,
    STEPS,
    VOCABULARY,
    make_pairs,
    make_unpaired,
    save_llama,
)

FILE = Path(__file__).parents[1] / "assets" / "trl_values.json"
COMMON = {
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "bf16": False,
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
}
KEPT = ("loss", "rewards", "logps", "grad_norm", "kl", "accuracy", "margin")
DPO: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo hinge": {"loss_type": ["hinge"]},
    "dpo ipo": {"loss_type": ["ipo"]},
    # With one pair in a batch, this is the sigmoid loss with label smoothing.
    "dpo smoothed": {"loss_type": ["aot"], "label_smoothing": 0.2, "one": True},
    "dpo ftx": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "one": True},
}
SIMPO: dict[str, dict[str, Any]] = {
    "simpo": {},
    "simpo smoothed": {"label_smoothing": 0.2},
}


def tokenizer() -> Any:
    """Return a tokenizer of which every token is a number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}.": i for i in range(VOCABULARY)}, unk_token="t0."))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{EOS}.", pad_token="t0.")


def _text(ids: list[int]) -> str:
    return "".join(f"t{i}. " for i in ids)


def _pairs() -> list[dict[str, str]]:
    # TRL appends the end-of-text token by itself.
    return [
        {
            "prompt": _text(p.prompt),
            "chosen": _text(p.chosen[:-1]),
            "rejected": _text(p.rejected[:-1]),
        }
        for p in make_pairs()
    ]


def _batches(one: bool) -> dict[str, int]:
    size = 1 if one else BATCH
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": BATCH // size}


def head(weight: Any) -> list[float]:
    """Return the first values of a tensor."""
    values: list[float] = weight.detach().flatten()[:4].tolist()
    return values


def _run(trainer: Any) -> dict[str, Any]:
    from transformers import TrainerCallback

    gradients: dict[str, list[float]] = {}

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if not gradients:
                named = trainer.model.named_parameters()
                gradients.update({name: head(weight.grad) for name, weight in named})

    trainer.add_callback(Recorder())
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == STEPS
    names = {name: None for line in lines for name in line if name.startswith(KEPT)}
    # A batch without undesirable completions has no mean of them.
    steps = {name: [line.get(name) for line in lines] for name in names}
    trained = {name: head(weight) for name, weight in trainer.model.named_parameters()}
    return {"steps": steps, "first gradients": gradients, "trained weights": trained}


def record(folder: Path) -> dict[str, Any]:
    """Run every trainer."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model, words, values = save_llama(folder / "hf"), tokenizer(), {}

    def load() -> Any:
        return LlamaForCausalLM.from_pretrained(model)

    for name, changes in DPO.items():
        more = {key: value for key, value in changes.items() if key != "one"}
        config = DPOConfig(str(folder), **COMMON, **_batches("one" in changes), **more)
        data = Dataset.from_list(_pairs())
        trainer = DPOTrainer(load(), load(), config, train_dataset=data, processing_class=words)
        values[name] = _run(trainer)
    for name, more in SIMPO.items():
        simpo = {"beta": 2.5, "simpo_gamma": 2.5 * 1.4, "loss_type": "simpo", "cpo_alpha": 0.0}
        config = CPOConfig(str(folder), **COMMON, **_batches(False), **simpo, **more)
        data = Dataset.from_list(_pairs())
        values[name] = _run(CPOTrainer(load(), config, train_dataset=data, processing_class=words))
    unpaired = [
        {"prompt": _text(one.prompt), "completion": _text(one.completion[:-1]), "label": one.label}
        for one in make_unpaired()
    ]
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.5}
    config = KTOConfig(str(folder), **COMMON, per_device_train_batch_size=KTO_BATCH, **weights)
    data = Dataset.from_list(unpaired)
    trainer = KTOTrainer(load(), load(), config, train_dataset=data, processing_class=words)
    values["kto"] = _run(trainer)
    scorer = save_llama(folder / "score", "LlamaForSequenceClassification")
    config = RewardConfig(str(folder), **COMMON, **_batches(False))
    whole = [
        {"chosen_ids": p.prompt + p.chosen, "rejected_ids": p.prompt + p.rejected}
        for p in make_pairs()
    ]
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_pretrained(scorer),
        config,
        train_dataset=Dataset.from_list(whole),
        processing_class=words,
    )
    values["orm"] = _run(trainer)
    return values


if __name__ == "__main__":
    import trl

    with tempfile.TemporaryDirectory() as name:
        found = {"trl": trl.__version__, **record(Path(name))}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
