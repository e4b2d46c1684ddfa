"""Adapters to inference frameworks; importing this package imports none of them."""
