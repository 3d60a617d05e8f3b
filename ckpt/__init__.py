"""Checkpoints that cannot lie: written in the background, verified while they are read, on any storage.

A checkpoint is one safetensors file per part and local rank, and a manifest, written last, that holds the digest of
every chunk. Nothing is believed because it exists: a step counts when its manifest verifies and its bytes agree.

Dive in: ``layout`` (names, files), ``record`` (the manifest file), ``writer``, ``reader``, ``catalog`` (which steps are
whole), ``retention``, ``saver`` (the background), ``remote`` (upload, cache, data positions), ``source`` (what a worker
restores from), ``interop`` (other systems' layouts).
"""
