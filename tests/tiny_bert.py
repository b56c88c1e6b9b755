"""A tiny BERT with a tokenizer, as a folder to upload to the Hub of a test."""

import json
from pathlib import Path

REVIEWS = Path(__file__).parent / "experiments" / "bert" / "reviews.jsonl"

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def save_tiny_bert(folder: Path, seed: int = 0) -> Path:
    """Store a classifier with random weights, and a tokenizer of the words in tests/experiments/bert."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    rows = [json.loads(line) for line in REVIEWS.read_text().splitlines()]
    words = sorted({word for row in rows for word in row["text"].split()})
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **SIZES))
    model.save_pretrained(folder)
    BertTokenizer(vocabulary).save_pretrained(folder)
    return folder
