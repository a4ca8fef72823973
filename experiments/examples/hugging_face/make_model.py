"""Make a tiny pretrained Llama with its tokenizer, offline: `python make_model.py FOLDER [STEPS]`.

It has 147,776 weights and is trained for a minute on the synthetic stories of sweep.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from sweep.data.synthetic_stories import synthetic_documents, synthetic_identity

END = "<|endoftext|>"
CONTEXT = 64
BATCH_SIZE = 16
LEARNING_RATE = 5e-3


def make_tokenizer(stories: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=511, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(stories, trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def main(folder: Path, steps: int) -> None:
    stories = list(synthetic_documents(synthetic_identity(), "train"))
    tokenizer = make_tokenizer(stories)
    end = tokenizer.token_to_id(END)
    ids_of_stories: list[int] = []
    for encoding in tokenizer.encode_batch(stories):
        ids_of_stories += [*encoding.ids, end]
    ids = torch.tensor(ids_of_stories)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=end + 1,
            bos_token_id=end,
            eos_token_id=end,
            max_position_embeddings=2 * CONTEXT,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for step in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH_SIZE, 1))
        batch = ids[starts + torch.arange(CONTEXT)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
