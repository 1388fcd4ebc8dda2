"""A small text data set that needs no download: the docstrings of four libraries, as sequences of token ids."""

import importlib
import inspect
import re

import torch
from torch import Tensor

LIBRARIES = {
    "numpy": ["numpy", "numpy.linalg", "numpy.random", "numpy.fft", "numpy.polynomial"],
    "scipy": ["scipy.stats", "scipy.special", "scipy.signal", "scipy.optimize", "scipy.linalg"],
    "networkx": ["networkx"],
    "torch": ["torch", "torch.nn", "torch.nn.functional", "torch.linalg", "torch.optim"],
}
VOCABULARY, LENGTH = 1000, 32


def load() -> tuple[Tensor, Tensor, list[str]]:
    """Token ids [n, LENGTH] of docstrings, the number of their library [n], and the libraries' names.

    A word's id is a hash of the word, so the vocabulary does not depend on the texts.
    """
    texts = {library: _docstrings(modules)[:400] for library, modules in LIBRARIES.items()}
    ids = [[_words(text) for text in found] for found in texts.values()]
    x = torch.tensor([row for rows in ids for row in rows])
    y = torch.tensor([label for label, rows in enumerate(ids) for _ in rows])
    return x, y, list(texts)


def _docstrings(modules: list[str]) -> list[str]:
    found = {}
    for module in map(importlib.import_module, modules):
        for name, member in sorted(vars(module).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            if text and len(text) > 200:
                found[text] = None
    return list(found)


def _words(text: str) -> list[int]:
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    ids = [1 + sum(ord(letter) * 31**n for n, letter in enumerate(word)) % (VOCABULARY - 1) for word in words]
    return ids + [0] * (LENGTH - len(ids))


if __name__ == "__main__":
    x, y, names = load()
    print(f"{len(y)} docstrings of {', '.join(names)}; {LENGTH} token ids each")
