"""Data of Hugging Face: a `datasets.Dataset`, and partitions made by flwr-datasets."""

import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import nn

import pdsl

images, digits = load_digits(return_X_y=True)
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
features = Features({"image": Sequence(Value("float32"), 64), "label": ClassLabel(names=names)})
dataset = Dataset.from_dict({"image": (images / 16).tolist(), "label": digits.tolist()}, features=features)
split = dataset.train_test_split(0.3, seed=0)

torch.manual_seed(0)  # initial weights
result = pdsl.train(nn.Linear(64, 10), split, graph={"kind": "ring", "agents": 5}, rounds=40)
print(result)

partitioner = DirichletPartitioner(num_partitions=5, partition_by="label", alpha=0.5, min_partition_size=50)
partitioner.dataset = split["train"]
partitions = [partitioner.load_partition(i) for i in range(5)]
result = pdsl.train(nn.Linear(64, 10), (partitions, split["test"]), graph="full", rounds=40)
print(result)
