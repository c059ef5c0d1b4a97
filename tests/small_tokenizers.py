"""Small tokenizers, trained in a moment, with the special tokens of every shipped template."""

import functools

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXT = (
    "The quick brown fox jumps over the lazy dog. Who are you? I am a small model, and I know "
    "little.\n\nHow much is 12 + 30? It is 42.\nuser assistant system tool model Human Assistant "
    "Instruction Response: na\u00efve caf\u00e9 \u4f60\u597d\u4e16\u754c \U0001f600 def f(x):\n"
    "    return x\n"
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<bos>", "<eos>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    *("[gMASK]", "<sop>", "sop", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    *("<reserved_106>", "<reserved_107>", "<|end|>"),
)


@functools.cache
def byte_level(eos: str = "<|im_end|>", bos: str | None = None, template: str | None = None):
    """Return a transformers tokenizer like GPT's and Qwen's: bytes, no space put in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return _wrap(tokenizer, eos, bos, template)


@functools.cache
def metaspace(scheme: str, eos: str = "</s>", bos: str | None = "<s>", template: str | None = None):
    """Return one like Llama's: words marked by U+2581, which also stands in front of a text.

    `scheme` says where: "first" or "always" as the pre-tokenizer does it, "prepend" as the old
    normalizer does.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = ["<unk>", *(f"<0x{number:02X}>" for number in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=bytes_, show_progress=False)
    tokenizer.train_from_iterator([line for line in TEXT.split("\n") if line] * 4, trainer)
    if scheme == "prepend":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.pre_tokenizer, tokenizer.normalizer = None, normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _wrap(tokenizer, eos, bos, template)


def _wrap(tokenizer, eos, bos, template):
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token="<|endoftext|>",
        chat_template=template,
    )
