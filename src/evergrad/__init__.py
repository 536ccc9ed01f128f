"""Evergrad keeps an open-weights agent in training for as long as it serves."""

__version__ = "0.1.0"
