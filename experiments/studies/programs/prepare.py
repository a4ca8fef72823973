"""Write the data that some of these programs train on, from a folder with train.txt and valid.txt.

    python experiments/studies/programs/prepare.py DATA_FOLDER results/programs/data

- spaCy: parts of 60 words of a story, labelled by the half of the story that they are from;
- TRL: stories as JSON lines, and an untrained Llama model of 0.2 million parameters;
- Lightning: a text with one story a line, of which the demo makes its vocabulary.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TRAIN_PARTS = 4096
VALID_PARTS = 1024


def load_stories(path: Path, count: int) -> list[str]:
    stories = path.read_text().split("<|endoftext|>")[:count]
    return [" ".join(story.split()) for story in stories if story.strip()]


def parts(stories: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the first and the last 60 words, without those of the opening sentence."""
    for story in stories:
        words = story.partition(".")[2].split()
        if len(words) >= 120:
            yield " ".join(words[:60]), "first"
            yield " ".join(words[-60:]), "second"


def write_spacy(out: Path, train: list[str], valid: list[str]) -> None:
    import spacy
    from spacy.tokens import DocBin

    nlp = spacy.blank("en")
    for name, stories, count in (("train", train, TRAIN_PARTS), ("valid", valid, VALID_PARTS)):
        documents = DocBin()
        chosen = [part for _, part in zip(range(count), parts(stories), strict=False)]
        assert len(chosen) == count
        for text, label in chosen:
            document = nlp.make_doc(text)
            document.cats = {"first": float(label == "first"), "second": float(label == "second")}
            documents.add(document)
        documents.to_disk(out / f"{name}.spacy")


def write_trl(out: Path, train: list[str], valid: list[str]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    for name, stories in (("train", train[:1500]), ("test", valid[:100])):
        lines = (json.dumps({"text": story}) + "\n" for story in stories)
        (out / "stories" / f"{name}.jsonl").write_text("".join(lines))

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<|endoftext|>"])
    bpe.train_from_iterator(train[:2000], trainer)
    end = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **end)
    tokenizer.save_pretrained(out / "llama")

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=1024, max_position_embeddings=128, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(out / "llama")


def write_lightning(out: Path, train: list[str]) -> None:
    """Lower case, without punctuation, and with rare words left out, for a small vocabulary."""
    lines = [re.sub(r"[^a-z ]", "", story.lower()) for story in train[:1500]]
    counts: dict[str, int] = {}
    for word in " ".join(lines).split():
        counts[word] = counts.get(word, 0) + 1
    kept_lines = []
    for line in lines:
        kept_lines.append(" ".join(word for word in line.split() if counts[word] >= 20))
    (out / "wikitext-2.txt").write_text("\n".join(kept_lines) + "\n")


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    (out / "stories").mkdir(parents=True, exist_ok=True)
    train, valid = (load_stories(source / f"{name}.txt", 8000) for name in ("train", "valid"))
    write_spacy(out, train, valid)
    write_trl(out, train, valid)
    write_lightning(out, train)
