"""Bytes: `allocator` is PyTorch's caching allocator in addresses only, `replay` runs a program through it, `memory` draws the
verdict, `remedies` says what would make it fit."""
