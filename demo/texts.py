"""What the demo reads: prompts, a text to calibrate scales on, a text to measure perplexity on."""

from __future__ import annotations

import importlib
import inspect

import torch
from click import ClickException
from transformers import PreTrainedTokenizerBase

CALIBRATION_TEXT = """\
A cache keeps what was expensive to compute. When a language model reads a sentence, every layer
turns every word into a key and a value, and each later word looks back at all of them. Without a
cache the work for word number n would grow with n squared; with one, it grows with n. The price is
memory: 2 x layers x heads x head size numbers per word, 1,024 words at a time, for every reader.

def halve(numbers: list[float]) -> list[float]:
    # Eight bits instead of sixteen: the same values, give or take 6 %.
    return [round(x / 2, 3) for x in numbers]

In March 1986 the library bought 12 new shelves. "They are full already!" said Mr. Okafor, and he
was right; by the summer, books stood in the corridor, under the stairs, and on the piano.
"""

# Long docstrings of modules that every supported Python has, in alphabetical order.
DOCUMENTED_MODULES = (
    "argparse",
    "collections",
    "csv",
    "difflib",
    "heapq",
    "json",
    "optparse",
    "pickle",
    "random",
    "shelve",
    "statistics",
    "string",
    "tempfile",
    "tokenize",
)


def docstring_text() -> str:
    """Docstrings of the running interpreter's standard library, joined in a fixed order.

    They differ a little between Python versions, and so do perplexities measured on them.
    """
    texts = [inspect.getdoc(importlib.import_module(name)) for name in DOCUMENTED_MODULES]
    if None in texts:
        raise ClickException("this Python keeps no docstrings (-OO): no text for the perplexity")
    return "\n\n".join(texts)


def member_docstrings() -> str:
    """Docstrings of the public classes and functions of the same modules, each after its name."""
    found = []
    for module in map(importlib.import_module, DOCUMENTED_MODULES):
        for name, member in sorted(vars(module).items()):
            own = getattr(member, "__module__", None) == module.__name__
            public = inspect.isclass(member) or inspect.isfunction(member)
            if own and public and not name.startswith("_") and member.__doc__:
                found.append(f"{name}: {inspect.getdoc(member)}")
    return "\n\n".join(found)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids (1, L), with the special tokens that the model expects around plain text."""
    return tokenizer(text, return_tensors="pt")["input_ids"]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """Token ids (1, L) of a user's turn for a chat model, of the plain text for a base model."""
    if tokenizer.chat_template is None:
        return encode(tokenizer, prompt)
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
