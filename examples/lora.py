"""Fine-tune a Transformer of Hugging Face with LoRA: only the adapters and the head are sent."""

import docstrings  # in this folder: docstrings of four libraries as token ids
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import pdsl

torch.manual_seed(0)
config = BertConfig(
    vocab_size=docstrings.VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=docstrings.LENGTH, num_labels=4,
    attn_implementation="eager",  # the other implementations are slow one record at a time
)  # fmt: skip
bert = BertForSequenceClassification(config)
model = get_peft_model(bert, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"]))
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

ids, y, libraries = docstrings.load()
data = {"input_ids": ids}, y  # the names are those of the arguments of `forward`
result = pdsl.train(
    model, data, classes=libraries, graph={"kind": "full", "agents": 3}, rounds=30, batch={"rate": 0.5},
    partition={"kind": "iid"},
)  # fmt: skip
print(result)
print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained and sent")
