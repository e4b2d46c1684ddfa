"""Text generation by a small real model whose K/V live in a paged FP8 cache: `python -m demo`."""
