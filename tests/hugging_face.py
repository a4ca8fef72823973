"""Small models of transformers with a tokenizer, as `save_pretrained` writes them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

STORIES = [f"Once there was a {color} cat. It liked the {thing}." for color in
           ("red", "blue", "green") for thing in ("sun", "rain", "wind", "snow")]  # fmt: skip


def gpt2(**ids: int) -> tuple[Any, str]:
    """Return a model with tied embeddings, and the maximum size of its files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **ids)
    return GPT2LMHeadModel(config), "1GB"


def llama(**ids: int) -> tuple[Any, str]:
    """Return a model with two embeddings, which pads with the end of a text, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        max_position_embeddings=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=False, pad_token_id=ids["eos_token_id"], **ids,
    )  # fmt: skip
    return LlamaForCausalLM(config), "50KB"


MODELS = {"gpt2": gpt2, "llama": llama}


def save_model(kind: str, folder: Path) -> Path:
    """Write a model whose end of a text is its last id, 299 or less."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=299, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(STORIES, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.enable_truncation(4)  # a saved tokenizer may keep such settings
    tokenizer.enable_padding(length=4)
    torch.manual_seed(0)
    model, most = MODELS[kind](vocab_size=end + 1, bos_token_id=end, eos_token_id=end)
    model.save_pretrained(folder, max_shard_size=most)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
