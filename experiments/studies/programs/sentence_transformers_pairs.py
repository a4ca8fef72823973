"""Train a static embedding by sentence-transformers' Trainer on pairs of sentences of a story.

    sweep run experiments/studies/programs/sentence_transformers.toml

As in its documentation (Training Overview). The lines with `sweep` are those that were added.
"""

import json
import re
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.models import StaticEmbedding
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import sweep

lines = Path("results/programs/data/stories/train.jsonl").read_text().splitlines()
stories = [json.loads(line)["text"] for line in lines]
pairs = []
for story in stories:
    sentences = re.findall(r"[A-Z][^.]+\.", story)
    if len(sentences) > 5:
        pairs.append((sentences[1], sentences[3]))
tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(
    stories, trainers.WordLevelTrainer(vocab_size=4000, special_tokens=["[UNK]"])
)
data = Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [p for _, p in pairs]})
train_dataset, eval_dataset = data.select(range(640)), data.select(range(640, 768))

torch.manual_seed(sweep.settings().seed)
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=64)], device="cpu")
loss = MultipleNegativesRankingLoss(model)
args = SentenceTransformerTrainingArguments(
    output_dir="out",
    use_cpu=True,
    lr_scheduler_type="cosine",
    warmup_ratio=0.1,
    logging_steps=5,
    report_to="none",
    save_strategy="no",
    per_device_eval_batch_size=64,
    disable_tqdm=True,
)
args = sweep.training_arguments(args)
trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    loss=loss,
    callbacks=[sweep.TrainerCallback()],
)
trainer.train()
